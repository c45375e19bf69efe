"""Plans of a soak: which sessions ask what and when, from a seed. Pure, so that a failure is one file to repeat."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

# Steps of a session, so that about as many want a seat as there are: with all of them waiting from the start, each
# would come back after its states were given to others.
SPREAD = 400
KINDS = ("plain", "foreign", "needle")  # own text of the model; non-ASCII text; a fact far in front of its question


@dataclass(frozen=True)
class Edges:
    """What of an engine makes a length special. All in tokens but `seats`."""

    block: int  # of the recurrent state: hits of the prefix cache are whole ones
    chunk: int  # of one step
    longest: int  # prompt and answer together
    seats: int = 8  # requests at once
    pool: int = 4  # neighbours that the indexer keeps as one
    sparse: int = 2048  # contexts up to this read everything
    far: int = 8192  # beyond this a needle is asked for
    graphs: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # sizes that steps are padded to


@dataclass(frozen=True)
class Sizes:
    """Inclusive bounds, in tokens but for `start`."""

    asked: tuple[int, int] = (7, 1500)
    answer: tuple[int, int] = (16, 300)
    start: int | None = None  # steps within which the sessions begin; None: by their number


@dataclass(frozen=True)
class Turn:
    asked: int  # new tokens of the user
    answer: int  # tokens; an answer never ends earlier
    seed: int
    kind: str = "plain"
    wait: int = 0  # steps after the turn before, or after the soak's start
    abort: int | None = None  # so many steps after it was asked it is taken back, if it still runs
    retry: int = 0  # steps until it is asked again
    edge: str | None = None  # why its prompt is as long as it is


@dataclass(frozen=True)
class Session:
    name: str
    prefix: int  # which text it shares with others
    shared: int  # how many tokens of it stand before the first turn
    turns: tuple[Turn, ...]
    logprobs: bool  # whether it asks for log-probabilities, which take another way through the sampler

    def prompt_lengths(self) -> list[int]:
        lengths, known = [], self.shared
        for turn in self.turns:
            known += turn.asked
            lengths.append(known)
            known += turn.answer
        return lengths


@dataclass(frozen=True)
class Plan:
    seed: int
    edges: Edges
    sessions: tuple[Session, ...]

    @property
    def turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


def edge_lengths(edges: Edges) -> dict[str, int]:
    """Name -> length of a prompt, for all edges that fit into the longest context of the engine with an answer."""
    found = {f"block x {n} {off:+d}": n * edges.block + off for n in (1, 2) for off in (-1, 0, 1)}
    found |= {f"chunk {off:+d}": edges.chunk + off for off in (-1, 0, 1, 2, 3)}
    found |= {f"sparse {off:+d}": edges.sparse + off for off in range(-1, edges.pool)}
    found |= {f"graph {size} {off:+d}": size + off for size in edges.graphs for off in (0, 1)}
    found |= {"far": edges.far + edges.pool + 1, "far +1": edges.far + edges.pool + 2}
    return {name: length for name, length in found.items() if 1 <= length <= edges.longest - 1}


def make_plan(
    seed: int, sessions: int, edges: Edges, sizes: Sizes = Sizes(), turns: tuple[int, int] = (1, 5),
    first: Sequence[str] = (),
) -> Plan:  # fmt: skip
    """Every edge is the length of some session's first prompt once there are as many sessions as edges; `first` names
    those that may be, where it is not empty.

    Raises ValueError where the shortest question and answer do not fit into the longest context.
    """
    if sizes.asked[0] + sizes.answer[0] > edges.longest:
        raise ValueError(
            f"a turn of {sizes.asked[0]} and an answer of {sizes.answer[0]} tokens do not fit into a context of "
            f"{edges.longest}; make the context longer or the turns shorter."
        )
    choose = random.Random(seed)
    names = list(first or edge_lengths(edges))
    choose.shuffle(names)
    if sizes.start is None:
        sizes = replace(sizes, start=max(200, SPREAD * sessions // edges.seats))
    planned = [_session(choose, i, names[i % len(names)], edges, sizes, turns) for i in range(sessions)]
    choose.shuffle(planned)  # who comes first has nothing to do with the edge
    return Plan(seed, edges, tuple(planned))


def _session(choose: random.Random, number: int, edge: str, edges: Edges, sizes: Sizes, turns) -> Session:
    length = edge_lengths(edges)[edge]
    asked = min(choose.randint(*sizes.asked), length - 1) if length > 1 else 1
    shared, known, made = length - asked, 0, []
    for index in range(choose.randint(*turns)):
        if index:
            edge, asked = _next_question(choose, known, edges, sizes)
        known = length if not index else known + asked
        room = edges.longest - known
        if room < 1 or (index and room < sizes.answer[0]):
            break
        answer = min(choose.randint(*sizes.answer), room)
        made.append(_turn(choose, asked, answer, edge, index, sizes.start))
        known += answer
    # Few texts, so that many sessions share one, and each is read again after others came between.
    return Session(f"s{number:03d}", choose.randrange(4), shared, tuple(made), choose.random() < 0.5)


def _next_question(choose: random.Random, known: int, edges: Edges, sizes: Sizes) -> tuple[str | None, int]:
    """(edge, tokens) of a later turn: as often as not one that ends on an edge within reach."""
    least, most = sizes.asked
    near = {name: length - known for name, length in edge_lengths(edges).items() if least <= length - known <= most}
    if near and choose.random() < 0.5:
        return choose.choice(sorted(near.items()))
    # Small turns are as likely as large ones of every size.
    return None, min(most, max(least, int(least * (most / least) ** choose.random())))


def _turn(choose: random.Random, asked: int, answer: int, edge: str | None, index: int, start: int) -> Turn:
    kind = "needle" if edge and edge.startswith("far") else choose.choices(KINDS[:2], (3, 1))[0]
    # Soon after its last answer, or after others have used what it left in the cache.
    wait = choose.randrange(start) if not index else choose.randrange(200 if choose.random() < 0.2 else 4)
    abort = None
    if choose.random() < 0.25:  # while its prompt is read, or in the answer
        abort = choose.choice((1, 2, 3, choose.randint(4, answer + 4)))
    return Turn(asked, answer, choose.getrandbits(32), kind, wait, abort, choose.choice((0, 1, 2, 50)), edge)


# Plans as files, and smaller ones


def to_json(plan: Plan) -> str:
    return json.dumps(asdict(plan), indent=1)


def from_json(text: str) -> Plan:
    """Raises ValueError for what is no plan."""
    try:
        data = json.loads(text)
        edges = Edges(**data["edges"] | {"graphs": tuple(data["edges"]["graphs"])})
        sessions = [Session(**s | {"turns": tuple(Turn(**turn) for turn in s["turns"])}) for s in data["sessions"]]
        return Plan(data["seed"], edges, tuple(sessions))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no plan of a soak: {error!r}; give a file that the soak wrote.") from error


def shrink(plan: Plan, fails, reruns: int = 20) -> tuple[Plan, int]:
    """(a smaller plan that still fails, reruns used). `fails(plan)` runs one; the plan given is known to fail.

    Halves, quarters and so on of the sessions are left out as long as it fails without them, then last turns.
    """
    used = 0

    def still(candidate: Plan) -> bool:
        nonlocal used
        if used >= reruns or not candidate.sessions:
            return False
        used += 1
        return fails(candidate)

    size = max(1, len(plan.sessions) // 2)
    while used < reruns and len(plan.sessions) > 1:
        for first in range(0, len(plan.sessions), size):
            rest = plan.sessions[:first] + plan.sessions[first + size :]
            if still(replace(plan, sessions=rest)):
                plan = replace(plan, sessions=rest)
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
        size = min(size, max(1, len(plan.sessions) // 2))
    for name in [session.name for session in plan.sessions]:
        while used < reruns and still(smaller := _without_last_turn(plan, name)):
            plan = smaller
    return plan, used


def _without_last_turn(plan: Plan, name: str) -> Plan:
    """An empty plan where nothing of that session may go."""
    if any(session.name == name and len(session.turns) < 2 for session in plan.sessions):
        return replace(plan, sessions=())
    shorter = [replace(s, turns=s.turns[:-1]) if s.name == name else s for s in plan.sessions]
    return replace(plan, sessions=tuple(shorter))
