"""Figures of the policy engine in a cluster of 10,000 pods, 1,000 namespaces and 5,000 policies.

The measuring runs in a process of its own, so that its memory is that of the engine and of nothing else. Times are by
the wall clock, as a user waits; each figure notes the machine's load, since a busy machine shows in them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import ParamSpec

import msgspec
from tests.support.cluster_samples import large_cluster
from tests.support.policy_oracle import Judge, Question

from bench.figures import Figure, figure
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.facts import Fact
from weft.domain.policy.explain.diff import diff
from weft.domain.policy.explain.explain import explain
from weft.domain.policy.model.identities import Pod
from weft.domain.policy.model.netpol import NetworkPolicy

PODS, NAMESPACES, POLICIES = 10_000, 1_000, 5_000
VERDICTS, LABEL_CHANGES, JUDGED = 5_000, 2_000, 20
WITHIN = 900

P = ParamSpec("P")


def run() -> dict[str, Figure]:
    """Measure in a fresh process."""
    answer = subprocess.run(
        [sys.executable, "-m", "bench.engine"],
        capture_output=True,
        check=True,
        timeout=WITHIN,
        cwd=Path(__file__).parents[1],
    )
    return msgspec.json.decode(answer.stdout, type=dict[str, Figure])


def measure() -> dict[str, Figure]:
    rng = Random(1)
    facts = large_cluster(rng, pods=PODS, namespaces=NAMESPACES, policies=POLICIES)
    start = time.perf_counter()
    engine = Engine(facts)
    compiled = time.perf_counter() - start
    explained = explain_all(engine, rng)
    judged = judge_some(facts, engine, rng)
    changed = change_labels(facts, engine, rng)
    # The other state of the diff is not part of what an engine needs.
    memory = resident_megabytes()
    compared = remove_one_policy(facts, engine)
    return {
        "verdict with explanation, p99": figure(
            percentile(explained, 99) * 1e3,
            peer=percentile(judged, 50) * 1e3,
            unit="ms",
            target=10,
            note=f"{VERDICTS} flows between random pods; peer: the slow evaluator, median of {JUDGED}, no explanation",
        ),
        "one label change, p99": figure(
            percentile(changed, 99) * 1e3,
            peer=compiled * 1e3,
            unit="ms",
            target=20,
            note=f"{LABEL_CHANGES} pods change sets; peer: computing everything anew, as without the dependency index",
        ),
        "full compile": figure(
            compiled,
            unit="s",
            target=10,
            note="no peer: the slow evaluator compiles nothing, it pays at every question",
        ),
        "memory": figure(
            memory,
            unit="MB",
            target=200,
            note="resident, the cluster's objects and the evaluator's lists included; no peer",
        ),
        "diff of one policy removed": figure(compared, unit="s", note="no peer offers it, no target is set"),
    }


def explain_all(engine: Engine, rng: Random) -> list[float]:
    def ask(source: str, target: str) -> None:
        explain(engine, engine.directory.flow(source, target, protocol=6, port=8080))

    keys = list(engine.workloads)
    return [seconds(ask, rng.choice(keys), rng.choice(keys)) for _ in range(VERDICTS)]


def judge_some(facts: list[Fact], engine: Engine, rng: Random) -> list[float]:
    judge, keys = Judge(facts), list(engine.workloads)
    questions = [Question(rng.choice(keys), rng.choice(keys), 6, 8080, 4) for _ in range(JUDGED)]
    return [seconds(judge.answer, question) for question in questions]


def change_labels(facts: list[Fact], engine: Engine, rng: Random) -> list[float]:
    pods = [fact for fact in facts if isinstance(fact, Pod)]
    changed = [
        msgspec.structs.replace(pod, labels={**pod.labels, "app": f"app-{rng.randrange(7)}"})
        for pod in rng.choices(pods, k=LABEL_CHANGES)
    ]
    return [seconds(engine.put, pod) for pod in changed]


def remove_one_policy(facts: list[Fact], engine: Engine) -> float:
    policy = next(fact for fact in facts if isinstance(fact, NetworkPolicy))
    after = engine.copy()
    after.remove_network_policy(policy.metadata.namespace, policy.metadata.name)
    return seconds(diff, engine, after)


def seconds(act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> float:
    start = time.perf_counter()
    act(*args, **kwargs)
    return time.perf_counter() - start


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(measure())))
