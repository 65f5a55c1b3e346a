"""The optional parts of fedcgd, and what to install where a package of one is missing."""

EXTRAS = {
    "torch": "torch",
    "matplotlib": "simulation",
    "opacus": "opacus",
    "flwr": "flower",
    "ray": "simulation",
    "sklearn": "simulation",
    "transformers": "nlp",
    "triton": "gpu",
}
"""The extra that brings each package, by the package's import name."""


def missing_package(error: ModuleNotFoundError) -> str:
    """Which package was not found, and what installs it."""
    package = (error.name or "").partition(".")[0]
    wanted = f'"fedcgd[{EXTRAS[package]}]"' if package in EXTRAS else package
    return f"this needs the package {package}, which is not installed: pip install {wanted}"
