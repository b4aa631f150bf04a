"""What Vinaroz and Park (2022) print: their tables, set by set."""

from __future__ import annotations

NATURAL_CLIPS = (20, 10, 1)
# F-norms on means, on covariances, and their average.
PAPER_MIXTURE = {
    "SEP": (0.0020, 0.0004, 0.0012),
    "SEP clipped, C 20": (0.0263, 0.0004, 0.0134),
    "SEP clipped, C 10": (1.4950, 0.0005, 0.7477),
    "SEP clipped, C 1": (2.2065, 0.0459, 1.1262),
    "DP-SEP, epsilon 50": (2.2411, 0.0358, 1.1385),
    "DP-SEP, epsilon 5": (12.1623, 1.0655, 6.6139),
    "DP-SEP, epsilon 1": (82.9746, 5.0777, 44.0262),
    "DP-EM, epsilon 50": (5.3769, 1.3189, 3.3479),
    "DP-EM, epsilon 5": (10.4548, 3.7573, 7.1060),
    "DP-EM, epsilon 1": (7.5166, 57.8665, 32.6916),
}
METHODS = ("VI", "ADF", "EP", "SEP", "SEP clipped", "DP-SEP", "DP-VI")
# Tables 3 and 4: error and log-likelihood of each method, in the order of METHODS; the paper has no row for ADF.
PAPER_ERRORS: dict[str, tuple[float | None, ...]] = {
    "naval": (0.005, None, 0.003, 0.002, 0.002, 0.002, 0.010),
    "kin8nm": (0.099, None, 0.088, 0.089, 0.078, 0.078, 0.098),
    "power_plant": (4.327, None, 4.098, 4.061, 4.013, 4.032, 4.350),
    "wine_red": (0.646, None, 0.614, 0.623, 0.627, 0.627, 0.734),
    "protein": (4.842, None, 4.654, 4.602, 4.581, 4.585, 4.934),
    "year": (9.034, None, 8.865, 8.873, 8.862, 8.862, 9.971),
}
PAPER_LIKELIHOODS: dict[str, tuple[float | None, ...]] = {
    "naval": (3.734, None, 4.164, 4.609, 4.710, 4.686, 3.253),
    "kin8nm": (0.897, None, 1.007, 0.999, 1.121, 1.125, 0.928),
    "power_plant": (-2.890, None, -2.830, -2.821, -2.809, -2.814, -3.077),
    "wine_red": (-0.980, None, -0.926, -0.936, -0.938, -0.938, -1.213),
    "protein": (-2.992, None, -2.957, -2.945, -2.941, -2.941, -3.049),
    "year": (-3.622, None, -3.604, -3.599, -3.598, -3.597, -3.974),
}
PAPER_POINTS = {
    "naval": 0.001,
    "kin8nm": 0.091,
    "power_plant": 4.182,
    "wine_red": 0.645,
    "protein": 4.539,
    "year": 8.932,
}
# Tables 8 and 9: error and log-likelihood of DP-SEP at each of the clips.
CLIPS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0)
PAPER_CLIPS = {
    "naval": ((0.0025, 0.0026, 0.0034, 0.0034, 0.0038, 0.0042), (4.545, 4.535, 4.443, 4.430, 4.360, 4.242)),
    "kin8nm": ((0.079, 0.082, 0.083, 0.085, 0.087, 0.090), (1.116, 1.108, 1.098, 1.093, 1.091, 1.069)),
    "power_plant": ((3.997, 4.007, 4.014, 4.057, 4.081, 4.153), (-2.805, -2.835, -2.845, -2.862, -2.886, -2.915)),
    "wine_red": ((0.600, 0.605, 0.608, 0.612, 0.619, 0.636), (-0.903, -0.907, -0.911, -0.915, -0.926, -0.932)),
    "protein": ((4.601, 4.660, 4.692, 4.746, 4.797, 4.946), (-2.945, -2.968, -2.984, -3.020, -3.064, -3.096)),
    "year": ((9.971, 10.013, 10.025, 10.041, 10.064, 10.108), (-3.974, -4.001, -4.015, -4.026, -4.042, -4.099)),
}
# Table 7: epochs, batch, clip and noise of the paper's DP-VI, with the training records of a split.
PAPER_VARIATIONAL = {
    "naval": (100, 100, 5.0, 1.3, 10_740),
    "kin8nm": (100, 100, 1.0, 1.7, 7372),
    "power_plant": (200, 100, 1.0, 2.0, 8611),
    "wine_red": (40, 100, 5.0, 30.0, 1439),
    "protein": (100, 200, 1.0, 1.2, 41_157),
    "year": (40, 2000, 1.0, 1.1, 463_715),
}
