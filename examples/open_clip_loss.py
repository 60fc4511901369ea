"""The training step of open_clip with another objective: only the line that creates the loss
changes.

A tiny CLIP of transformers replaces the model here. The model of open_clip returns its outputs in
the same form.
"""

import torch
from tiny_models import captioned_images, tiny_clip

from visavis.integrations.open_clip import ClipLoss
from visavis.objectives import NTXent

model, batch = tiny_clip(), captioned_images()
ids = batch.pop("labels")
loss = ClipLoss(NTXent(), local_loss=True, gather_with_grad=True, rank=0, world_size=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

losses = []
for _ in range(10):
    clip_output = model(**batch)
    outputs = {
        "image_features": clip_output.image_embeds,
        "text_features": clip_output.text_embeds,
        "logit_scale": model.logit_scale.exp(),
    }
    # With image_ids, captions of the same image are not negatives of each other.
    value = sum(loss(**outputs, image_ids=ids, output_dict=True).values())
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    losses.append(value.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
