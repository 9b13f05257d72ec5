"""
What a stranger may have put into a JSON file: types swapped, numbers that are huge or none, texts with controls, things
missing, added, nested. Used by test_foreign_*.py and test_page.py; --fuzz N makes N damages of each file.
"""
import copy
import json
import math
import random
import time
import warnings

import common
from conftest import OPTIONS
from tests.harness import is_one_line

FUZZ = OPTIONS["fuzz"] or 100 # of each file; CI has 25 minutes

def nested(depth):
    value = 1
    for _ in range(depth):
        value = {"list": [value]}
    return value

STRANGE = [None, True, False, 0, -1, 1, 2, 3.5, 1e300, -1e300, 1e999, math.nan, 10**30, "", "8", "nan", "\x1b[2J\n",
           "x" * 5000, [], [1], [[]], {}, {"a": 1}, {"(.+)+!": 4}, {"to_q": 4}, {"": 2}, nested(50), "\u202e",
           "../../etc", "__class__"]

def keys_of(place):
    if isinstance(place, dict):
        return list(place)
    return list(range(len(place))) if isinstance(place, list) else []

def damage(rng, value, strange=STRANGE):
    """A JSON value with one to three changes, anywhere in it: types swapped, huge, nested, missing, added."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        place = value
        while keys := keys_of(place):
            key = rng.choice(keys)
            if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.7:
                place = place[key]
                continue
            how = rng.random()
            if how < 0.7:
                place[key] = copy.deepcopy(rng.choice(strange))
            elif how < 0.85:
                del place[key]
            elif isinstance(place, dict):
                place[rng.choice([*keys, "x", "\x1b", "rank_pattern"])] = copy.deepcopy(rng.choice(strange))
            else:
                place.insert(0, copy.deepcopy(rng.choice(strange)))
            break
    return value

def fuzz(name, value, case, seconds=2.0, share=1, refuses=True, strange=STRANGE):
    """case(damaged value) succeeds or raises an InputError of one line, within these seconds. share: of the FUZZ.
    refuses: some are refused; what skips damages refuses none. strange: the values that come into it."""
    rng, refusals = random.Random(name), 0
    for n in range(round(FUZZ * share)):
        damaged, begun = damage(rng, value, strange), time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case(damaged)
        except common.InputError as e:
            refusals += 1
            assert is_one_line(str(e)) and len(str(e)) < 3000, (n, str(e)[:3000])
        except Exception as e:
            raise AssertionError(f"case {n}: {json.dumps(damaged)[:2000]}") from e
        assert time.process_time() - begun < seconds, (n, json.dumps(damaged)[:2000])
    print(f"{name}: {FUZZ} damages, {refusals} refused")
    assert refusals or not refuses
