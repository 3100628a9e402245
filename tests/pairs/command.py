"""Draw cases from a seed and play each; a case that fails is made as small as it still fails, and printed as one command.

    make pairs                       a new seed, which is printed; 45 cases
    make pairs SEED=7 N=20
    python tests/pairs what=sweep where=session end=TERM       one case

What fails is a finding: mend it, and add its line to tests/pairs/found.txt, which the tests always play.
"""

import argparse
import random
import signal
import sys
import time

from pairs.draw import draw, pairs_of, possible_pairs
from pairs.features import FEATURES, HOSTS, OFF, named, read, why_not
from pairs.play import BrokenError, play
from ssh import hosts


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("-n", type=int, default=45)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("case", nargs="*", metavar="FEATURE=VALUE")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also behind a shell's `&`
    signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # also behind `nohup`: runs would ignore it, as they should
    if options.case:
        return 0 if _tell(read(options.case), shrink=False) else 1
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 30)
    features = features_here()
    cases = draw(seed, options.n, features)
    has = set().union(*map(pairs_of, cases))
    print(
        f"seed {seed}: {len(cases)} cases, {len(has)} of {len(possible_pairs(features))} pairs",
        flush=True,
    )
    begun = time.monotonic()
    failed = [case for case in cases if not _tell(case, shrink=not options.no_shrink)]
    print(f"{len(cases) - len(failed)} of {len(cases)} held, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


def features_here():
    """Return the features with the values that this machine can try."""
    if (reason := hosts.why_not()) is None:
        return FEATURES
    print(f"without hosts: {reason}", flush=True)
    return FEATURES | {"where": tuple(v for v in FEATURES["where"] if v not in HOSTS)}


def _tell(case, *, shrink):
    begun = time.monotonic()
    error = _broken(case)
    print(
        f"{'held  ' if error is None else 'BROKEN'} {time.monotonic() - begun:5.1f} s  {named(case)}",
        flush=True,
    )
    if error is None:
        return True
    if shrink:
        case, error = smallest(case, error)
    for said in error.typed[-4:]:
        print(f"    $ {' '.join(said.argv[2:])}   # {said.code}")
    print(f"  {error}\n  again: python tests/pairs {named(case)}", flush=True)
    return False


def _broken(case):
    try:
        play(case)
    except BrokenError as error:
        return error
    return None


def smallest(case, error, broken=_broken):
    """Return the case with as few values as still break the same promise, and how it is broken then."""
    before = None
    while case != before:  # what a value needs goes after it
        before = case
        for feature in FEATURES:
            less = {**case, feature: OFF[feature]}
            if less == case or why_not(less) is not None:
                continue
            found = broken(less)
            if found is not None and found.promise == error.promise:
                case, error = less, found
    return case, error


if __name__ == "__main__":
    sys.exit(main())
