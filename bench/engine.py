"""The policy engine with 10,000 pods, 1,000 namespaces and 5,000 policies.

It runs in a separate process, so that the memory is the engine's own. Times are wall-clock times; each figure notes
the machine's load, which affects them.
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
from tests.support.policy_oracle import FlowSpec, PolicyOracle

from bench import policy_cost
from bench.figures import Figure, figure
from weft.domain.policy.engine.engine import Engine, PolicyObject
from weft.domain.policy.explain.diff import diff
from weft.domain.policy.explain.explain import explain
from weft.domain.policy.model.identities import Pod
from weft.domain.policy.model.netpol import NetworkPolicy

PODS, NAMESPACES, POLICIES = 10_000, 1_000, 5_000
VERDICTS, LABEL_CHANGES, ORACLE_VERDICTS = 5_000, 2_000, 20
WITHIN = 900

P = ParamSpec("P")


def run() -> dict[str, Figure]:
    """Measure in a new process."""
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
    objects = large_cluster(rng, pods=PODS, namespaces=NAMESPACES, policies=POLICIES)
    start = time.perf_counter()
    engine = Engine(objects)
    compiled = time.perf_counter() - start
    explained = explain_all(engine, rng)
    oracle_times = evaluate_with_oracle(objects, engine, rng)
    changed = change_labels(objects, engine, rng)
    # The second state of the diff does not belong to the engine's memory.
    memory = resident_megabytes()
    compared = remove_one_policy(objects, engine)
    return {
        "verdict with explanation, p99": figure(
            percentile(explained, 99) * 1e3,
            peer=percentile(oracle_times, 50) * 1e3,
            unit="ms",
            target=10,
            note=f"{VERDICTS} flows between random pods; peer: the policy oracle, median of {ORACLE_VERDICTS}",
        ),
        "one label change, p99": figure(
            percentile(changed, 99) * 1e3,
            peer=compiled * 1e3,
            unit="ms",
            target=20,
            note=f"{LABEL_CHANGES} pods change sets; peer: a full recompute, as without the dependency index",
        ),
        "full compile": figure(
            compiled,
            unit="s",
            target=10,
            note="no peer: the policy oracle compiles nothing and scans all objects for every flow",
        ),
        "memory": figure(
            memory,
            unit="MB",
            target=200,
            note="resident, the cluster's objects and the evaluator's lists included; no peer",
        ),
        "diff of one policy removed": figure(compared, unit="s", note="no peer, no target"),
        **policy_cost.measure(),
    }


def explain_all(engine: Engine, rng: Random) -> list[float]:
    def explain_flow(source: str, target: str) -> None:
        explain(engine, engine.directory.flow(source, target, protocol=6, port=8080))

    keys = list(engine.workloads)
    return [seconds(explain_flow, rng.choice(keys), rng.choice(keys)) for _ in range(VERDICTS)]


def evaluate_with_oracle(objects: list[PolicyObject], engine: Engine, rng: Random) -> list[float]:
    oracle, keys = PolicyOracle(objects), list(engine.workloads)
    flow_specs = [FlowSpec(rng.choice(keys), rng.choice(keys), 6, 8080, 4) for _ in range(ORACLE_VERDICTS)]
    return [seconds(oracle.verdict, flow_spec) for flow_spec in flow_specs]


def change_labels(objects: list[PolicyObject], engine: Engine, rng: Random) -> list[float]:
    pods = [value for value in objects if isinstance(value, Pod)]
    changed = [
        msgspec.structs.replace(pod, labels={**pod.labels, "app": f"app-{rng.randrange(7)}"})
        for pod in rng.choices(pods, k=LABEL_CHANGES)
    ]
    return [seconds(engine.put, pod) for pod in changed]


def remove_one_policy(objects: list[PolicyObject], engine: Engine) -> float:
    policy = next(value for value in objects if isinstance(value, NetworkPolicy))
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
