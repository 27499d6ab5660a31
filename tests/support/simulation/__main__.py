"""Replays seeds: `python -m support.simulation --seed 7`."""

import argparse
import sys

from support.simulation.world import simulate


def main() -> int:
    """Run seeds; return 1 if one shows a defect."""
    parser = argparse.ArgumentParser(prog="python -m support.simulation")
    parser.add_argument("--seed", type=int, default=0, help="The first seed.")
    parser.add_argument("--num-seeds", type=int, default=1, help="How many to run.")
    parser.add_argument("--wire", action="store_true", help="Show each message on the wire.")
    parser.add_argument("--quiet", action="store_true", help="Show no journal.")
    args = parser.parse_args()
    num_bad = 0
    for seed in range(args.seed, args.seed + args.num_seeds):
        report = simulate(seed)
        num_bad += bool(report.problems)
        if not args.quiet:
            print("\n".join(line for line in report.lines if args.wire or " wire " not in line))
        if report.problems or not args.quiet:
            print(report)
            print(f"  digest {report.digest}")
    print(f"{args.num_seeds} seeds, {num_bad} with a defect")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
