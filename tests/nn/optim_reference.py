"""Writes optim_reference.inc: results of PyTorch's optimizers and schedules (20 steps) and of GradScaler (50 steps).

    python3 optim_reference.py > optim_reference.inc

PyTorch has no optimizer Lion, so this script implements it. The parameters are five numbers, float32 for GradScaler and
float64 otherwise. gradient() computes their gradients from their values and the step number; optim_test.cpp and
grad_scaler_test.cpp repeat this formula.
"""
import argparse
import math

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

# Imported after the parsing, because --help must work without these packages.
import torch

STEPS = 20
START = [0.5, -1.25, 2.0, 0.0, -0.75]


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al., "Symbolic discovery of optimization algorithms", 2023."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))
        self.averages = {}

    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.averages.get(p, torch.zeros_like(p.data))
                direction = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                p.data -= lr * (direction + group["weight_decay"] * p.data)
                self.averages[p] = beta2 * m + (1 - beta2) * p.grad


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.1)),
    "sgd_decay": (torch.optim.SGD, dict(lr=0.1, weight_decay=0.05)),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.05, momentum=0.9)),
    "sgd_dampening": (torch.optim.SGD, dict(lr=0.05, momentum=0.8, dampening=0.3, weight_decay=0.02)),
    "sgd_nesterov": (torch.optim.SGD, dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "sgd_maximize": (torch.optim.SGD, dict(lr=0.01, momentum=0.5, weight_decay=0.1, maximize=True)),
    "adam": (torch.optim.Adam, dict(lr=0.05)),
    "adam_betas": (torch.optim.Adam, dict(lr=0.02, betas=(0.8, 0.95), eps=1e-3)),
    "adam_decay": (torch.optim.Adam, dict(lr=0.05, weight_decay=0.1)),
    "adam_amsgrad": (torch.optim.Adam, dict(lr=0.05, betas=(0.9, 0.5), amsgrad=True)),
    "adam_maximize": (torch.optim.Adam, dict(lr=0.05, maximize=True, weight_decay=0.1)),
    "adamw": (torch.optim.AdamW, dict(lr=0.05)),
    "adamw_amsgrad": (torch.optim.AdamW, dict(lr=0.05, betas=(0.9, 0.5), weight_decay=0.3, amsgrad=True)),
    "adamw_maximize": (torch.optim.AdamW, dict(lr=0.05, weight_decay=0.3, maximize=True)),
    "rmsprop": (torch.optim.RMSprop, dict()),
    "rmsprop_alpha": (torch.optim.RMSprop, dict(lr=0.02, alpha=0.9, eps=1e-4, weight_decay=0.1)),
    "rmsprop_momentum": (torch.optim.RMSprop, dict(lr=0.005, momentum=0.9)),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.1)),
    "adagrad_decay": (torch.optim.Adagrad, dict(lr=0.2, lr_decay=0.1, weight_decay=0.05,
                                                initial_accumulator_value=0.3, eps=1e-3)),
    "adagrad_maximize": (torch.optim.Adagrad, dict(lr=0.05, maximize=True)),
    "lion": (Lion, dict(lr=0.02)),
    "lion_decay": (Lion, dict(lr=0.01, betas=(0.8, 0.95), weight_decay=0.2)),
    "rmsprop_centered": (torch.optim.RMSprop, dict(lr=0.005, centered=True, momentum=0.5, weight_decay=0.1)),
}

SCHEDULES = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=6, gamma=0.5),
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.25, end_factor=0.75, total_iters=8),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=15, eta_min=0.02),
    "cosine_warmup": lambda o: torch.optim.lr_scheduler.SequentialLR(o, [
        torch.optim.lr_scheduler.LinearLR(o, start_factor=0.01, total_iters=5),
        torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=15)], milestones=[5]),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[12, 4, 4], gamma=0.5),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.9),
    "polynomial": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, total_iters=15, power=2.5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.7, total_steps=21),
    "one_cycle_three": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, 0.7, total_steps=21, pct_start=0.4, anneal_strategy="linear", three_phase=True, base_momentum=0.6,
        max_momentum=0.8, div_factor=10, final_div_factor=100),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(o, [
        torch.optim.lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=4),
        torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.8),
        torch.optim.lr_scheduler.PolynomialLR(o, total_iters=10)], milestones=[5, 12]),
}

PLATEAUS = {
    "min": dict(factor=0.5, patience=2, threshold=0.01),
    "max_abs": dict(mode="max", factor=0.3, patience=1, threshold=0.05, threshold_mode="abs", cooldown=2, min_lr=0.02),
}


def gradient(p, step):
    return [(i + 1) * 0.5 * p[i] + math.sin(1.7 * step + i) * 3 / (step + 1) for i in range(len(p))]


def metric(step):
    return 1 + math.cos(0.9 * step) / (step + 1)


def run_optimizer(kind, options):
    p = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    optimizer = kind([p], **options)
    for step in range(STEPS):
        p.grad = torch.tensor(gradient(p.tolist(), step), dtype=torch.float64)
        optimizer.step()
    return p.tolist()


def run_schedule(make):
    """Returns the learning rates of all steps, followed by the momenta."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4, momentum=0.5)
    schedule = make(optimizer)
    groups = [dict(optimizer.param_groups[0])]
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        groups.append(dict(optimizer.param_groups[0]))
    return [g["lr"] for g in groups] + [g["momentum"] for g in groups]


def run_plateau(options):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    rates = []
    for step in range(STEPS):
        schedule.step(metric(step))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def run_scaler(kind, options, clips):
    """Takes 50 steps, some with an infinite or NaN gradient. Returns the scale after each step, then the parameters."""
    p = torch.tensor(START, dtype=torch.float32, requires_grad=True)
    optimizer = kind([p], **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=6)
    scales = []
    for step in range(50):
        optimizer.zero_grad()
        weight = torch.tensor(gradient(START, step))
        if step % 9 == 0 or step == 31:
            weight[step % 5] = math.inf if step % 2 else math.nan
        scaler.scale((p * weight).sum()).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([p], 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales + p.tolist()


SCALED = {
    "adam": (torch.optim.Adam, dict(lr=0.05), False),
    "adam_clips": (torch.optim.Adam, dict(lr=0.05), True),
    "sgd": (torch.optim.SGD, dict(lr=0.02, momentum=0.9, dampening=0.5), False),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.1, lr_decay=0.1), True),
}


def table(name, rows):
    print(f"const std::map<std::string, std::vector<double>> {name} = {{")
    for key, values in rows.items():
        print(f'    {{"{key}", {{{", ".join(repr(float(v)) for v in values)}}}}},')
    print("};")


print("// Written by optim_reference.py; do not edit. clang-format off")
table("kOptimizerReference", {k: run_optimizer(*v) for k, v in OPTIMIZERS.items()})
table("kScheduleReference", {k: run_schedule(v) for k, v in SCHEDULES.items()})
table("kPlateauReference", {k: run_plateau(v) for k, v in PLATEAUS.items()})
table("kScalerReference", {k: run_scaler(*v) for k, v in SCALED.items()})
