"""Writes the files that pytorch_model_test.cpp reads. Needs PyTorch and the safetensors package.

    python3 pytorch_model.py

pytorch_model.safetensors holds the state_dict of a model. pytorch_model_results.safetensors holds an input, the output
of the model, and the gradients of the sum of the squared output with respect to the input and every parameter.
"""
import argparse
import pathlib

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

# Imported after the parsing, because --help must work without these packages.
import torch
from safetensors.torch import save_file
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose3d(4, 6, (4, 3, 2), stride=(2, 2, 1), padding=(1, 0, 1), output_padding=(0, 1, 0), groups=2)
        self.norm = nn.GroupNorm(3, 6)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv3d(6, 4, 3, padding=1, bias=False), nn.InstanceNorm3d(4, affine=True),
                                  nn.Sequential(nn.SiLU(), nn.Conv3d(4, 2, 1)))
        self.head = nn.Linear(6, 3)
        self.head_norm = nn.LayerNorm(3)
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x):
        return self.head_norm(self.head(self.body(self.norm(self.up(x)))))


torch.manual_seed(0)
model = Model()
for name, parameter in model.named_parameters():  # affine parameters start as ones and zeros, which would hide errors
    if "norm" in name or name.startswith("body.2"):
        nn.init.normal_(parameter, 0.5)
x = torch.randn(2, 4, 3, 4, 7, requires_grad=True)
y = model(x)
y.square().sum().backward()
results = {"input": x, "output": y, "grad.input": x.grad}
results |= {f"grad.{name}": parameter.grad for name, parameter in model.named_parameters()}

folder = pathlib.Path(__file__).parent
save_file(model.state_dict(), folder / "pytorch_model.safetensors", {"format": "pt"})
save_file({name: value.detach().contiguous() for name, value in results.items()},
          folder / "pytorch_model_results.safetensors")
