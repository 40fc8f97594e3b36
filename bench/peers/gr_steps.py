"""Training steps of Meta's HSTU or of FuXi-alpha, with their own code from a checkout, for `nestpipe bench gr`.

    .venv-peers/bin/python bench/peers/gr_steps.py --config FILE.json --out FILE.json

The config has the sizes of the workload, `variant` ("hstu" or "fuxi"), the folder `checkout`, `turns`, `core`, the files `data`
(batches) and `weights` (for a loss without dropout that ours has too), and `places`, the places of a padded history.  What is
theirs comes from the checkout when this runs: model, loss, sampler of negatives, and the order of their training loop.
"""

import argparse
import importlib
import importlib.util
import json
import os
import resource
import sys
import time
import types
from pathlib import Path

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm, which the peers call
import numpy as np
import torch
from timed_turns import TimedTurns

UNUSED = ("einops",)
"""What their modules import and steps do not use: an empty module will do where it is not installed."""
PADDING = 1
"""Ids are counted from 1 there."""
ROOTS = {"hstu": "generative_recommenders.research.", "fuxi": "generative_recommenders."}
CLASSES = {"hstu": "HSTU", "fuxi": "FuXi"}
LOSSES = {"hstu": "modeling.sequential.losses.sampled_softmax", "fuxi": "modeling.sequential.autoregressive_losses"}
SIMILARITIES = {"hstu": "rails.similarities.dot_product_similarity_fn", "fuxi": "modeling.similarity.dot_product"}


class Peer:
    """Their model, loss and optimizer, in the sizes of the workload, with dropout or without."""

    def __init__(self, config, dropout):
        kind, dim, places = config["variant"], config["dim"], config["places"]
        torch.manual_seed(config["seed"])

        def theirs(name):
            return importlib.import_module(ROOTS[kind] + name)

        embeddings = theirs("modeling.sequential.embedding_modules")
        preprocessors = theirs("modeling.sequential.input_features_preprocessors")
        postprocessors = theirs("modeling.sequential.output_postprocessors")
        samplers = theirs("modeling.sequential.autoregressive_losses")
        encoder = getattr(theirs(f"modeling.sequential.{kind}"), CLASSES[kind])
        sizes = {"max_sequence_len": config["max_length"], "max_output_len": places - config["max_length"]}
        sizes |= {"embedding_dim": dim, "num_blocks": config["blocks"], "num_heads": config["heads"]}
        sizes |= {"linear_dim": dim // config["heads"], "attention_dim": dim // config["heads"]}
        sizes |= {"normalization": "rel_bias", "linear_config": "uvqk", "linear_activation": "silu"}
        sizes |= {"linear_dropout_rate": dropout, "attn_dropout_rate": 0.0, "verbose": False}
        if kind == "fuxi":
            sizes |= {"ffn_multiply": 1, "ffn_single_stage": False}
        self.model = encoder(
            embedding_module=embeddings.LocalEmbeddingModule(config["items"], dim),
            similarity_module=theirs(SIMILARITIES[kind]).DotProductSimilarity(),
            input_features_preproc_module=preprocessors.LearnablePositionalEmbeddingInputFeaturesPreprocessor(
                places, dim, dropout
            ),
            output_postproc_module=postprocessors.L2NormEmbeddingPostprocessor(dim, eps=1e-6),
            **sizes,
        )
        items = self.model._embedding_module._item_emb
        ids = list(range(PADDING, PADDING + config["items"]))
        self.sampler = samplers.LocalNegativesSampler(config["items"], items, ids, l2_norm=True, l2_norm_eps=1e-6)
        self.loss_of = theirs(LOSSES[kind]).SampledSoftmaxLoss(config["negatives"], config["temperature"], self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)

    def loss(self, batch):
        lengths, ids, times = batch
        embedded = self.model.get_item_embeddings(ids)
        found = self.model(
            past_lengths=lengths, past_ids=ids, past_embeddings=embedded, past_payloads={"timestamps": times}
        )
        loss = self.loss_of(
            lengths=lengths,
            output_embeddings=found[:, :-1, :],
            supervision_ids=ids[:, 1:],
            supervision_embeddings=embedded[:, 1:, :],
            supervision_weights=(ids[:, 1:] != 0).float(),
            negatives_sampler=self.sampler,
        )
        return loss[0] if isinstance(loss, tuple) else loss

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()


def padded(drawn, places):
    """(lengths, ids, times) as their loader pads them: each history followed by its last target, then zeros."""
    lengths = torch.from_numpy(drawn["lengths"])
    ids, times = (torch.zeros(len(lengths), places, dtype=torch.int64) for _ in range(2))
    at = 0
    for row, n in enumerate(lengths.tolist()):
        ids[row, : n + 1] = torch.from_numpy(drawn["items"][at : at + n + 1]) + PADDING
        times[row, : n + 1] = torch.from_numpy(drawn["times"][at : at + n + 1])
        at += n + 1
    return lengths, ids, times


def check_loss(config, batch, given):
    """Their loss with our weights and negatives, without dropout."""
    peer = Peer(config, dropout=0.0)
    given = {name: torch.from_numpy(array) for name, array in given.items()}
    negatives = given["negatives"] + PADDING

    def given_negatives(positive_ids, num_to_sample):
        return negatives, peer.sampler.normalize_embeddings(peer.sampler._item_emb(negatives))

    peer.sampler.forward = given_negatives
    with torch.no_grad():
        peer.model._embedding_module._item_emb.weight[PADDING:] = given["table"]
        peer.model._input_features_preproc._pos_emb.weight.copy_(given["places"])
        blocks = (peer.model._hstu if config["variant"] == "hstu" else peer.model._fuxi)._attention_layers
        for number, block in enumerate(blocks):
            ours = {name.split(".", 2)[2]: w for name, w in given.items() if name.startswith(f"blocks.{number}.")}
            block._rel_attn_bias._pos_w.copy_(ours["place_bias"])
            (copy_hstu if config["variant"] == "hstu" else copy_fuxi)(block, ours, config["dim"], config["heads"])
        return float(peer.loss(batch))


def copy_hstu(block, ours, dim, heads):
    block._rel_attn_bias._ts_w.copy_(ours["time_bias"])
    block._uvqk.copy_(ours["uvqk.weight"].T)
    block._o.weight.copy_(ours["out.weight"])
    block._o.bias.copy_(ours["out.bias"])


def copy_fuxi(block, ours, dim, heads):
    """Their channels are side by side within a head (place, time, meaning), ours hold all heads (meaning, time, place)."""
    order = torch.arange(3 * dim).view(3, heads, dim // heads).flip(0).transpose(0, 1).reshape(-1)
    block._rel_attn_bias._ts_w.copy_(ours["time.weights"])
    mixed = ours["mixed.weight"]
    block._uvqk.copy_(torch.cat([mixed[: 3 * dim][order], mixed[3 * dim :]]).T)
    feed = block._mffn
    feed.lin0.weight.copy_(ours["out.weight"][:, order])
    feed.lin0.bias.copy_(ours["out.bias"])
    first, second = ours["up.weight"].chunk(2)
    feed.lin1.weight.copy_(first)
    feed.lin3.weight.copy_(second)
    feed.lin2.weight.copy_(ours["down.weight"])


def measured_peak(size=1024, rounds=6):
    """FLOPs a second of a product of float32 matrices: the best of some rounds, as `nestpipe.models.flops` measures it."""
    a, out = torch.ones(size, size), torch.empty(size, size)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def run(config, turns):
    turns.wait(0)
    with np.load(config["data"]) as stored:
        drawn = [{k: stored[f"{k}{i}"] for k in ("lengths", "items", "times")} for i in range(config["batches"])]
    batches = [padded(batch, config["places"]) for batch in drawn]
    with np.load(config["weights"]) as given:
        loss = check_loss(config, batches[0], dict(given))
    peer = Peer(config, config["dropout"])
    peer.model.train()
    peer.step(batches[0])
    turns.done(0)

    def step(turn):
        peer.step(batches[(turn - 1) % len(batches)])

    taken = turns.take(config["turns"], config["steps"], step, measured_peak)
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"turns": taken, "check_loss": loss, "peak_bytes": peak_bytes}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for the report; turns are given in its folder")
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text())
    os.sched_setaffinity(0, {config["core"]})
    torch.set_num_threads(1)
    sys.path.insert(0, config["checkout"])
    for name in UNUSED:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
    report = run(config, TimedTurns(arguments.out.parent, 0))
    arguments.out.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
