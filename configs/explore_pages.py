"""Every reachable state of the page machine.

python -m experiments.explore_pages --config=configs/explore_pages.py --workdir=DIR
    5 pages x 3 requests x 2 pools x 1 transfer: minutes on one core; expects no broken invariant, and a
    counterexample for every mutation but the redundant one.
python -m experiments.explore_pages --config=configs/explore_pages.py:quick --workdir=DIR
    3 pages x 2 requests: seconds.
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Returns the full size, or the one that ``arg`` names ("quick")."""
    sizes = {"": (5, 3, 3, 3), "quick": (3, 2, 2, 3)}
    if arg not in sizes:
        raise ValueError(f"argument {arg!r} is not one of {sorted(sizes)}")
    pages, requests, pages_per_row, mutation_pages = sizes[arg]
    return ConfigDict(
        {
            "pages": pages,
            "requests": requests,
            "pages_per_row": pages_per_row,
            "mutation_pages": mutation_pages,
        }
    )
