"""What sharing is worth: HSTU on MovieLens-100K with 64 negatives shared to 128, beside 64 and 128 that are drawn.

    python bench/sharing.py --data u.data [--epochs 40] [--seeds 5] [--workers 2] [--results sharing-runs] [--json FILE]

Printed: the mean of each metric over seeds, and the mean difference to 128 drawn negatives and to 64, with a 95 %
interval by Student's t over seeds.
"""

from __future__ import annotations

from paired_seeds import compare, parser, train_all, write

VARIANTS = {
    "64": ["data.negatives=64"],
    "64 -> 128 logits": ["data.negatives=64", "model.sharing=logits", "model.sharing_factor=2"],
    "64 -> 128 negatives": ["data.negatives=64", "model.sharing=negatives", "model.sharing_factor=2"],
    "128": ["data.negatives=128"],
}
METRICS = ("hr@10", "ndcg@10")


def main() -> None:
    options = parser(__doc__, "sharing-runs").parse_args()
    found = train_all(VARIANTS, [], METRICS, options)
    write(compare(found, ("128", "64"), METRICS), options)


if __name__ == "__main__":
    main()
