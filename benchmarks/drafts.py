"""Speed with and without drafts, of one stream and of several, in one run.

    python benchmarks/drafts.py                                                    # the default model on this CPU
    python benchmarks/drafts.py --backend torch --device cuda --streams 1,4,64     # on a GPU

Workloads:

- `edit`: a file of the conversation is sent again with one constant changed. `predicted`: the same, and the client
  sends the changed file as its prediction.
- `proof`: a letter is sent again with its spelling corrected.
- `json`: fields of a letter are extracted by a schema.
- `free`: text that repeats nothing (temperature 1). `wrong`: the same, with a prediction of something else.

Every stream has a prompt of its own. Rounds with and without drafts alternate, and answers are compared.
"""

from __future__ import annotations

import difflib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import harness

from quire.core.step import StepPlan
from quire.engine.engine import StepEstimator, Work, work_of
from quire.engine.generation import EngineOutput, GenerationParams
from quire.engine.llm import LLM
from quire.text.grammar import Grammar, GrammarKind

SIDES = ("plain", "drafted")
MIN_COPIED = 20  # characters: shorter runs do not count as copied
FILE = '''"""Prices of an order: items, discounts, tax and shipping."""

TAX_RATE = 0.19
FREE_SHIPPING_FROM = 50.0
SHIPPING_COST = 4.9


class Item:
    """One line of an order."""

    def __init__(self, name, price, count=1):
        self.name = name
        self.price = price
        self.count = count

    def cost(self):
        """Return the price of all pieces."""
        return self.price * self.count


class Order:
    """A list of items and an optional discount in percent."""

    def __init__(self, customer, discount=0):
        self.customer = customer
        self.discount = discount
        self.items = []

    def add(self, name, price, count=1):
        """Add an item to the order."""
        if price < 0:
            raise ValueError(f"price {price} is negative")
        self.items.append(Item(name, price, count))

    def subtotal(self):
        """Return the cost of all items, without discount."""
        return sum(item.cost() for item in self.items)

    def total(self):
        """Return what the customer pays: discount, tax and shipping included."""
        net = self.subtotal() * (100 - self.discount) / 100
        gross = net * (1 + TAX_RATE)
        if gross < FREE_SHIPPING_FROM:
            gross += SHIPPING_COST
        return round(gross, 2)


def report(orders):
    """Print one line for each order."""
    for order in orders:
        print(f"{order.customer}: {len(order.items)} items, {order.total()} EUR")
'''
LETTER = (
    "Dear members of the garden club,\n\n"
    "our summer meeting takes place on Saturday, {day} June, at ten o'clock in the old greenhouse. Please bring "
    "gloves, a small shovel and a bottle of water. We will plant three apple trees, repair the fence behind the "
    "shed and paint the two benches next to the pond.\n\n"
    "At noon there will be soup, bread and lemonade. Anna Miller brings the plates, and Thomas Reed brings the "
    "cups. If you can bring a cake or a salad, please write to Anna Miller before Wednesday.\n\n"
    "In the afternoon we will choose a new treasurer. Two members have offered to do this work: Peter Stone, who "
    "has been with us for nine years, and Maria Lopez, who keeps the books of the school library. Everyone who "
    "has paid the fee for this year may vote.\n\n"
    "The fee remains twelve pounds. You can pay it to Peter Stone at the meeting or send it to the account of the"
    " club. Last year we spent most of the money on seeds, a new water pump and the roof of the shed. A full "
    "report is on the board at the entrance of the greenhouse.\n\n"
    "Please park your cars at the church, because the lane to the greenhouse is closed. Children are welcome, and"
    " so are friendly dogs.\n\n"
    "Kind regards,\n"
    "Susan Hill, chair of the garden club\n"
)
ORDER = (
    "Dear team, please process order {number} of 3 March 2026 for Ada Lovelace, 12 Analytical Road, London. She"
    " ordered two brass gears for the difference engine and one punched card reader. The order was paid by bank"
    " transfer. Kind regards, Charles Babbage"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "order_number": {"type": "integer"},
        "customer_name": {"type": "string", "maxLength": 30},
        "customer_address": {"type": "string", "maxLength": 60},
        "ordered_items": {"type": "string", "maxLength": 120},
        "payment_method": {"enum": ["bank transfer", "credit card", "cash on delivery"]},
        "signed_by": {"type": "string", "maxLength": 30},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]


GREEDY = GenerationParams(temperature=0, max_tokens=340)


class Task(NamedTuple):
    chat: Any
    params: GenerationParams
    source: str = ""  # what the answer copies


def edit(number: int) -> Task:
    rate = f"0.{21 + number}"
    turns = (
        "Write a Python file that computes the prices of an order.",
        f"```python\n{FILE}```",
        f"Change TAX_RATE to {rate} and send me the whole file again.",
    )
    chat = [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]
    return Task(chat, GREEDY, FILE)


def predicted(number: int) -> Task:
    task = edit(number)
    changed = FILE.replace("0.19", f"0.{21 + number}")
    return task._replace(params=replace(GREEDY, prediction=f"```python\n{changed}```"))


def proof(number: int) -> Task:
    letter = LETTER.replace("{day}", str(14 + number % 16))
    wrong = letter.replace("Wednesday", "Wensday").replace("remains", "remians")
    ask = "Correct the spelling mistakes in this letter and reply with the whole letter:"
    return Task(f"{ask}\n\n{wrong}", GREEDY, letter)


def extract(number: int) -> Task:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, sort_keys=True))
    letter = ORDER.replace("{number}", str(4711 + number))
    return Task(f"Extract the fields of this letter as JSON:\n\n{letter}", replace(GREEDY, grammar=grammar), letter)


def free(number: int) -> Task:
    params = GenerationParams(temperature=1.0, top_p=1.0, seed=7 + number, max_tokens=160, ignore_eos=True)
    return Task("Write a story about a lighthouse.", params)


def wrong(number: int) -> Task:
    task = free(number)
    return task._replace(params=replace(task.params, prediction=FILE))


WORKLOADS: dict[str, Callable[[int], Task]] = {
    "edit": edit,
    "predicted": predicted,
    "proof": proof,
    "json": extract,
    "free": free,
    "wrong": wrong,
}


class Run(NamedTuple):
    tokens: list[tuple[int, ...]]
    texts: list[str]
    seconds: float
    num_steps: int
    num_drafted: int
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds


class Side:
    """An engine whose scheduler knows the cost of a step, as in a worker."""

    def __init__(self, model: str, *, has_drafts: bool, **settings: Any) -> None:
        self.llm = LLM(model, enable_drafts=has_drafts, enable_prefix_caching=False, **settings)
        engine = self.llm.engine
        while engine.runner.prepare():
            pass
        self._estimator = StepEstimator()
        self._planned = self._running = Work()
        self._num_steps = 0
        self._step = engine.step
        engine.on_plan = self._note
        engine.step = self._step_and_learn  # type: ignore[method-assign]

    def _note(self, plan: StepPlan) -> None:
        self._planned = work_of(plan)
        self._num_steps += not plan.is_empty

    def _step_and_learn(self) -> list[EngineOutput]:
        engine, start_s = self.llm.engine, time.monotonic()
        outputs = self._step()
        done = self._planned
        if engine.capacity.has_overlap:
            done, self._running = self._running, self._planned
        if engine.capacity.has_costly_rows:
            self._estimator.learn(done, time.monotonic() - start_s)
            engine.scheduler.policy.ledger.cost = self._estimator.cost()
        return outputs

    def run(self, tasks: Sequence[Task]) -> Run:
        scheduler = self.llm.engine.scheduler
        num_drafted, num_accepted = scheduler.num_drafted, scheduler.num_accepted
        num_steps = self._num_steps
        start_s = time.perf_counter()
        outputs = self.llm.chat([task.chat for task in tasks], [task.params for task in tasks])
        seconds = time.perf_counter() - start_s
        answers = [output.completions[0] for output in outputs]
        return Run(
            [one.token_ids for one in answers],
            [one.text for one in answers],
            seconds,
            self._num_steps - num_steps,
            scheduler.num_drafted - num_drafted,
            scheduler.num_accepted - num_accepted,
        )


def copied(tasks: Sequence[Task], texts: Sequence[str]) -> float:
    """Share of the answers that is copied from their sources, in runs of at least MIN_COPIED characters."""
    num_copied = 0
    for task, text in zip(tasks, texts, strict=True):
        runs = difflib.SequenceMatcher(None, task.source, text, autojunk=False).get_matching_blocks()
        num_copied += sum(run.size for run in runs if run.size >= MIN_COPIED)
    return num_copied / max(sum(map(len, texts)), 1)


def measure(sides: dict[str, Side], name: str, num_streams: int, rounds: int) -> None:
    tasks = [WORKLOADS[name](number) for number in range(num_streams)]
    calls: dict[str, Callable[[int], Run]] = {key: lambda _, side=side: side.run(tasks) for key, side in sides.items()}  # type: ignore[misc]
    plain, drafted = harness.alternate(calls, rounds, num_warm_ups=1).values()
    ratios = harness.ratios([run.speed for run in drafted], [run.speed for run in plain])
    before, after = (statistics.median(run.speed for run in runs) for runs in (plain, drafted))
    is_equal = all(one.tokens == other.tokens for one, other in zip(plain, drafted, strict=True))
    last, num_plain_steps = drafted[-1], plain[-1].num_steps
    print(
        f"{name:9} {num_streams:3} streams: {statistics.median(ratios):5.2f} times ({min(ratios):.2f} to"
        f" {max(ratios):.2f}), {before:.1f} -> {after:.1f} tok/s;"
        f" answers {'equal' if is_equal else 'DIFFER'}, {last.num_tokens} tokens,"
        f" {copied(tasks[:1], last.texts[:1]):.0%} copied"
    )
    harness.say(
        f"{'':21} steps {num_plain_steps} -> {last.num_steps}, {last.num_tokens / last.num_steps:.2f} tokens per step,"
        f" {last.num_accepted} of {last.num_drafted} drafts right"
    )


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=harness.numbers, default=(1,), help="numbers of streams")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=harness.names(WORKLOADS), default=tuple(WORKLOADS), help="names of workloads")
    parser.add_argument("--control", action="store_true", help="no drafts on either side: shows the noise")
    args = parser.parse_args()
    settings = {"backend": args.backend, "device": args.device, "dtype": args.dtype, "num_blocks": 4000}
    sides = {name: Side(args.model, has_drafts=name != "plain" and not args.control, **settings) for name in SIDES}
    print(f"{sides['plain'].llm.engine.runner.facts()}")
    for name in args.only:
        for num_streams in args.streams:
            measure(sides, name, num_streams, args.rounds)
    for side in sides.values():
        side.llm.close()


if __name__ == "__main__":
    main()
