"""CLIP and SigLIP models, adapters, and conversion of open_clip checkpoints."""
