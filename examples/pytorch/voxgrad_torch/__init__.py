"""PyTorch modules and functions on the kernels of voxgrad.

    import voxgrad_torch
    voxgrad_torch.replace_modules(model)
"""

from . import functional, nn, ops
from ._library import has_cuda
from ._library import version as __version__
from .nn import (Conv2d, Conv3d, ConvTranspose2d, ConvTranspose3d, GroupNorm, InstanceNorm2d, InstanceNorm3d,
                 Sequential)
from .replace import Report, replace_modules, replaced_modules, restore_modules

__all__ = ["Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d", "GroupNorm", "InstanceNorm2d", "InstanceNorm3d",
           "Report", "Sequential", "functional", "has_cuda", "nn", "ops", "replace_modules", "replaced_modules",
           "restore_modules"]
