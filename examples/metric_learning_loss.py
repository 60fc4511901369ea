"""A loss in the style of pytorch-metric-learning: images with labels, compared with each other."""

import torch
from tiny_models import captioned_images, tiny_clip

from visavis.integrations.pytorch_metric_learning import MetricLoss
from visavis.objectives import TripletHN

encoder, batch = tiny_clip().vision_model, captioned_images()
images, labels = (
    batch["pixel_values"] + 0.3 * torch.randn_like(batch["pixel_values"]),
    batch["labels"],
)
# Use a mean, as the losses of that library do.
loss = MetricLoss(TripletHN(margin=0.2, reduction="half_mean"))
optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)

losses = []
for _ in range(10):
    value = loss(encoder(pixel_values=images).pooler_output, labels)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    losses.append(value.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
