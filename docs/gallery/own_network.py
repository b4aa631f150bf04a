"""Any torch module: a small convolutional network, sampled by SGHMC."""

import torch
from matplotlib import pyplot
from torch import nn

import confide
from confide.data import load_dataset, prepare

digits = prepare(load_dataset("digits"), layout="image")
schema = digits.encoder.schema
assert schema.records is not None  # the catalogue declares it; a size read off the records would not be public
data = confide.PrivateData(digits.x, digits.y, schema=schema)
plan = confide.plan(epsilon=4, delta=1e-4, records=schema.records, batch=256, epochs=20)
network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 10))
run = confide.fit(confide.methods.SGHMC(), network, data, plan)
right = run.posterior.summary(torch.as_tensor(digits.x_test)).centre.argmax(1) == torch.as_tensor(digits.y_test)
print(f"accuracy {right.float().mean():.3f} with epsilon {run.privacy.epsilon():.3f}; {run.posterior.facts}")

doubt = run.posterior.predict(torch.as_tensor(digits.x_test)).epistemic
figure, axis = pyplot.subplots(figsize=(6, 2.6), layout="constrained")
axis.hist([doubt[right].numpy(), doubt[~right].numpy()], bins=20, density=True, label=["right", "wrong"])
axis.set(xlabel="epistemic uncertainty, nats", ylabel="density")
axis.legend()
figure.savefig("own_network.png", dpi=100)
