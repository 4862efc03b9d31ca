"""Replaces modules of torch.nn in a model with those of voxgrad_torch."""

import contextlib
import dataclasses

import torch

from . import nn

_REPLACEMENTS = {getattr(torch.nn, name): getattr(nn, name) for name in (
    "Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d", "GroupNorm", "InstanceNorm2d", "InstanceNorm3d",
    "Sequential")}
_RELATED = (torch.nn.modules.conv._ConvNd, torch.nn.modules.batchnorm._NormBase, torch.nn.GroupNorm)


@dataclasses.dataclass
class Report:
    """The result of replace_modules(). Both members map the name of a module to a text."""

    replaced: dict  # name of the module -> name of the class that computes the module now
    left: dict  # name of a convolution or norm that was not replaced -> the reason

    def __str__(self):
        count = len(self.replaced)
        lines = [f"replaced {count} {'module' if count == 1 else 'modules'}, left {len(self.left)}"]
        lines += [f"  {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def _reason_to_leave(module):
    """Returns the reason why a module is not replaced, or None if it can be replaced."""
    if type(module) not in _REPLACEMENTS:
        return f"{type(module).__name__} has no replacement"
    if "forward" in vars(module):
        return "its forward was replaced"
    if getattr(module, "track_running_stats", False):
        return "it has running statistics"
    parameters = list(module.parameters(recurse=False))
    for p in parameters:
        if p.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return f"its parameters are {p.dtype}"
    return None


def replace_modules(model):
    """Replaces the convolutions and norms of `model` with those of voxgrad_torch, in place. Returns a Report.

    A module keeps its identity, parameters, hooks and name in state_dict(); only its class changes. An nn.Sequential
    becomes a Sequential that fuses a convolution with the norm and the activation that follow it. Subclasses, modules
    with running statistics and modules with unsupported dtypes are not replaced; the report states why.
    """
    report = Report({}, {})
    for name, module in model.named_modules():
        if type(module) is torch.nn.Sequential or isinstance(module, _RELATED):
            if type(module).__module__.startswith(__package__):
                continue
            reason = _reason_to_leave(module)
            if reason is None:
                module.__class__ = _REPLACEMENTS[type(module)]
                report.replaced[name] = type(module).__name__
            else:
                report.left[name] = reason
    return report


def restore_modules(model):
    """Restores the torch.nn classes of all modules that replace_modules() replaced."""
    originals = {new: old for old, new in _REPLACEMENTS.items()}
    for module in model.modules():
        module.__class__ = originals.get(type(module), type(module))


@contextlib.contextmanager
def replaced_modules(model):
    """Replaces the modules of `model` during a with statement, whose value is the Report."""
    before = [(module, type(module)) for module in model.modules()]
    try:
        yield replace_modules(model)
    finally:
        for module, kind in before:
            module.__class__ = kind
