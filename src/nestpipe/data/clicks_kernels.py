"""The kernel that draws synthetic clicks.  Releases the GIL; every number is drawn by counter."""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.data.counter import STEP, bell, mix, power_law_rank, power_law_span, uniform

# Numbers of a sample's draws: features count up from 0, dense features from here, the label has its own.
_DENSE = np.uint64(1 << 32)
_LABEL = np.uint64(1 << 33)


@numba.njit(nogil=True, cache=True)
def draw_clicks(  # type: ignore[no-untyped-def]
    start, count, draw_key, feature_keys, effect_key, ids, hot, zipf, id_scale, product_scale, dense_weights, bias
):
    """Samples start..start+count: lengths [F*B] and values of a feature-major jagged array, dense, truth, labels."""
    features = ids.shape[0]
    keys = np.empty(count, np.uint64)
    for i in range(count):
        keys[i] = mix(draw_key + np.uint64(start + i) * STEP)

    lengths = np.ones(features * count, np.int64)
    total = 0
    for f in range(features):
        if hot[f] > 1:
            for i in range(count):
                bits = mix(keys[i] + np.uint64(f) * STEP)
                lengths[f * count + i] = np.int64(uniform(bits) * (2 * hot[f] + 1))
                total += lengths[f * count + i]
        else:
            total += count

    values = np.empty(total, np.int64)
    logit = np.full(count, bias)
    partner = np.empty(count, np.float64)
    at = 0
    for f in range(features):
        span = power_law_span(ids[f], zipf)
        for i in range(count):
            bag_key = mix(keys[i] + np.uint64(f) * STEP)
            effect = 0.0
            for j in range(lengths[f * count + i]):
                u = uniform(mix(bag_key + np.uint64(j + 1) * STEP))
                rank = power_law_rank(u, ids[f], zipf, span)
                key = mix(feature_keys[f] + np.uint64(rank))
                values[at] = np.int64(key)
                at += 1
                effect += bell(mix(key ^ effect_key))
            logit[i] += effect * id_scale[f]
            # Features 2k and 2k+1 are partners; a scale of 0 switches a pair off.
            if f % 2 == 0:
                partner[i] = effect * product_scale[f]
            else:
                logit[i] += partner[i] * effect * product_scale[f]

    dense = np.empty((count, dense_weights.shape[0]), np.float32)
    truth = np.empty(count, np.float32)
    labels = np.empty(count, np.float32)
    for i in range(count):
        for d in range(dense_weights.shape[0]):
            x = bell(mix(keys[i] + (_DENSE + np.uint64(d)) * STEP))
            dense[i, d] = x
            logit[i] += x * dense_weights[d]
        p = np.float32(1.0 / (1.0 + np.exp(-logit[i])))
        truth[i] = p
        labels[i] = 1.0 if uniform(mix(keys[i] + _LABEL * STEP)) < p else 0.0
    return lengths, values, dense, truth, labels
