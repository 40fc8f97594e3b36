"""A ranking model from training to serving: trains a small one if there is none, serves it, and sends 200 requests.

Half of the users are announced while "retrieval" still runs, as a cascade would; some come back.  Prints what happened.
`make serve` runs it; `python examples/serving.py RUN` serves a run of yours on the data of its evaluation.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from nestpipe.data.stream import Stream
from nestpipe.infer.open_run import open_data, open_model
from nestpipe.serve import Client
from nestpipe.train.evaluate_ranking import requests_of

RUN = Path("runs/serving")
TRAIN = ["train", "hstu-ranking", "--run", str(RUN), "--steps", "60", "--set", "checkpoint.every_steps=60"]
REQUESTS = 200
RETRIEVAL = 0.05


def main() -> None:
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else RUN
    if not (run / "checkpoints").exists():
        print("training a small ranking model, once ...", flush=True)
        subprocess.run([sys.executable, "-m", "nestpipe", *TRAIN], check=True)
    opened = open_model(run)
    asked = []
    for batch in Stream(open_data(opened.recipe, "eval"), 64):
        asked += requests_of(batch, getattr(opened.model.config, "context", ()))
        if len(asked) >= 60:
            break
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        command = [
            sys.executable,
            "-m",
            "nestpipe",
            "serve",
            str(run),
            "--port",
            "0",
            "--arena",
            "64MB",
            "--dram",
            "64MB",
        ]
        server = subprocess.Popen([*command, "--json", str(told)])
        try:
            while not (told.exists() and told.read_text().endswith("}\n")):
                if server.poll() is not None:
                    raise SystemExit(server.returncode)
                time.sleep(0.1)
            facts = json.loads(told.read_text())
            with Client(facts["url"], facts["model"]) as client:
                send(client, asked)
            print(f"the page: {facts['url']}/ while it serves; it is stopped now")
            server.send_signal(signal.SIGTERM)
            server.wait(30)
        finally:
            server.kill()


def send(client: Client, asked: list) -> None:
    draw = np.random.default_rng(0)
    took: dict[str, list[float]] = {}
    reasons: Counter[str] = Counter()
    for _ in range(REQUESTS):
        user = int(draw.integers(len(asked)))
        history, now, candidates = asked[user]
        if draw.random() < 0.5:
            reasons[client.preinfer(user, history, due_ms=1e3 * RETRIEVAL)["reason"]] += 1
            time.sleep(RETRIEVAL)
        begun = time.perf_counter()
        ranked = client.rank(user, history, np.resize(candidates, 256), now)
        took.setdefault(ranked.path, []).append(1e3 * (time.perf_counter() - begun))
        assert np.isfinite(ranked.scores).all()
    print(f"{REQUESTS} requests of {len(asked)} users, 256 candidates each; pre-inference: {dict(reasons)}")
    for path, ms in sorted(took.items()):
        print(f"  {path:9} {len(ms):4}   P50 {np.percentile(ms, 50):6.1f} ms   P99 {np.percentile(ms, 99):6.1f} ms")


if __name__ == "__main__":
    main()
