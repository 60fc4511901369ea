"""Export of models to formats of other libraries, with a model card and without a dependency on
visavis.
"""
