"""Where blocks are solved, and whether that and the report's devices are here."""

from __future__ import annotations

import torch

from kernels.devices import check_device
from ptq.recipe.problems import Faults
from ptq.recipe.schema import DevicesSpec, Recipe


def on_gpu(recipe: Recipe) -> bool:
    """Whether blocks will be run and solved on a GPU."""
    if recipe.device == "auto":
        return torch.cuda.is_available()
    return not recipe.without_gpu


def devices_of(recipe: Recipe) -> list[torch.device]:
    """Where blocks are run and solved; that the devices are here, the plan has checked."""
    kind, chosen = "cuda" if on_gpu(recipe) else "cpu", recipe.device
    if isinstance(chosen, str):
        return [torch.device(kind)]
    if chosen.gpus is None:
        return [torch.device(kind)] * (chosen.cpus or 1)
    return [torch.device(kind, index) for index in range(chosen.gpus)]


def check_devices(recipe: Recipe, solves: bool) -> Faults:
    """Devices that nothing can run on here: the report's and, if blocks are solved, theirs."""
    if solves and on_gpu(recipe) and not torch.cuda.is_available():
        found = repr(recipe.device) if isinstance(recipe.device, str) else "gpus"
        yield (
            ("device",),
            f"found {found}, but {_no_gpu()}; set device: auto, which takes a GPU where there is "
            "one, or cpu",
        )
    elif solves and isinstance(recipe.device, DevicesSpec) and recipe.device.gpus:
        yield from _check_gpus(recipe.device.gpus)
    if recipe.report.device == "auto":
        return
    try:
        chosen = recipe.report.device
        several = not isinstance(chosen, str)
        names = [f"cuda:{i}" for i in range(chosen.gpus or 0)] if several else [chosen]
        for device in names:
            check_device(device)
    except ValueError as error:
        yield ("report", "device"), str(error)


def _check_gpus(wanted: int) -> Faults:
    """That there are so many GPUs, and that they compute alike."""
    there = torch.cuda.device_count()
    if wanted > there:
        yield (
            ("device", "gpus"),
            f"found {wanted}, but torch sees {there} here; give at most {there}",
        )
        return
    kinds = dict.fromkeys(map(torch.cuda.get_device_name, range(wanted)))
    if len(kinds) > 1:
        yield (
            ("device", "gpus"),
            f"found {wanted}, which are {' and '.join(kinds)}; what comes out would depend on "
            "which does what: give as many as are of one kind, and show torch these alone "
            "(CUDA_VISIBLE_DEVICES)",
        )


def _no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is one without CUDA"
    return f"torch {torch.__version__} sees no GPU here (`nvidia-smi` tells whether there is one)"
