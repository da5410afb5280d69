"""Tasks whose response copies from the prompt, with one change: where prompt-lookup drafting is at its best."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from rollout_spec.workload.problems import NAMES, PLACES, THINGS

SURNAMES = (
    "Abe", "Berg", "Costa", "Diaz", "Endo", "Fox", "Gallo", "Haas", "Ito", "Jansen", "Kumar", "Lopez", "Moreau",
    "Novak", "Okoye", "Park", "Rossi",
)  # fmt: skip
SENTENCES = (
    "Early that year {name} opened a {place} and sold {n} {thing} in the first month.",
    "The neighbours had never seen so many {thing}, and {name} told everyone where they came from.",
    "When the rain came, {name} carried {n} {thing} indoors and closed the {place} for a day.",
    "A letter arrived for {name}, asking for {n} {thing} before the end of the week.",
    "By autumn the {place} was too small, so {name} rented a second room for the {thing}.",
    "In the evening {name} counted the {thing} twice and wrote {n} in the book.",
    "Nobody but {name} knew why the {place} stayed open until {n} minutes past nine.",
)
# A planted mistake, test, step and result of a function over the list `{v}`; {k} is a number.
FUNCTIONS = (
    ("best = {k}", "if item > best:", "best = item", "best"),
    ("total = {k}", "if item > {k}:", "total += item", "total"),
    ("count = {k}", "if item % {k} == 0:", "count += 1", "count"),
    ("kept = [{k}]", "if item not in kept:", "kept.append(item)", "kept"),
)


def sort_list(rng: Random) -> str:
    names = [f"{rng.choice(NAMES)} {surname}" for surname in rng.sample(SURNAMES, rng.randint(8, 12))]
    return "Rewrite this list sorted by surname, one name a line:\n" + "\n".join(names)


def edit_csv(rng: Random) -> str:
    things = rng.sample(THINGS, 7)
    rows = [f"{thing},{rng.randint(1, 99)},{rng.randint(1, 40)}.{rng.randrange(10)}0" for thing in things]
    change = f"set the quantity of {rng.choice(things)} to {rng.randint(100, 999)}"
    return "\n".join([f"Rewrite this CSV and {change}; keep the rest as it is:", "item,quantity,price", *rows])


def rename(rng: Random) -> str:
    (old, new), place, thing = rng.sample(NAMES, 2), rng.choice(PLACES), rng.choice(THINGS)
    chosen = rng.sample(SENTENCES, 4)
    passage = " ".join(line.format(name=old, place=place, thing=thing, n=rng.randint(10, 99)) for line in chosen)
    return f"Rewrite this passage with {new} in place of {old} and no other change:\n{passage}"


def fix_function(rng: Random) -> str:
    wrong, test, step, result = rng.choice(FUNCTIONS)
    values = {"v": rng.choice(THINGS), "k": rng.randint(2, 500)}
    lines = [
        f"def {rng.choice(('check', 'scan', 'measure', 'collect'))}_{values['v']}({values['v']}):", f"    {wrong}",
        f"    for item in {values['v']}:", f"        {test}", f"            {step}", f"    return {result}",
    ]  # fmt: skip
    code = "\n".join(lines).format(**values)
    return f"The first value in this function is wrong. Write the whole function again, fixed:\n```python\n{code}\n```"


def edit_json(rng: Random) -> str:
    people = rng.sample(NAMES, 5)
    rows = [f'  {{"name": "{p}", "team": "{rng.choice(THINGS)}", "score": {rng.randint(10, 99)}}}' for p in people]
    change = f"the score of {rng.choice(people)} changed to {rng.randint(100, 999)}"
    return f"Write this JSON again with {change} and nothing else:\n[\n" + ",\n".join(rows) + "\n]"


COPY_TASKS: tuple[Callable[[Random], str], ...] = (sort_list, edit_csv, rename, fix_function, edit_json)
