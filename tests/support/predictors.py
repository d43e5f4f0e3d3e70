"""Small random signature predictors."""

import numpy as np

from eldr_serve.experts.signature_predictor import SignaturePredictor

V, R, L, E, K = 11, 3, 2, 5, 2


def predictor(seed: int = 0, scale: float = 1.0) -> SignaturePredictor:
    rng = np.random.default_rng(seed)
    mean = rng.uniform(0.3, 0.6, (L, E))
    mean *= K / mean.sum(axis=1, keepdims=True)
    directions = rng.normal(size=(R, L, E))
    directions -= directions.mean(axis=2, keepdims=True)  # what one expert gains, the others lose
    experts = np.linalg.qr(directions.reshape(R, -1).T)[0].T.reshape(R, L, E)
    parts = (mean, scale * rng.normal(size=(V, R)), experts, np.ones(V))
    return SignaturePredictor("m", "t", K, *(np.ascontiguousarray(a, np.float32) for a in parts))


PREDICTOR = predictor()
