"""Make nuts_logistic.npz: a long NUTS run on a small logistic regression whose posterior is skewed.

    python tests/reference/make_nuts_reference.py        (needs numpyro)

Twelve records that a line nearly separates leave the slope's posterior with a long tail on one side, which no Gaussian
has. Stored are the records, the prior's scale, and of each coefficient mean, deviation, skewness and quantiles.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

PRIOR_SCALE = 2.0
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
CHAINS, WARM_UP, DRAWS = 4, 2000, 50_000


def records() -> tuple[np.ndarray, np.ndarray]:
    """Inputs (slope, constant) and labels: one label is on the wrong side."""
    x = np.array([-1.6, -1.3, -1.1, -0.9, -0.6, -0.2, 0.3, 0.5, 0.8, 1.0, 1.4, 1.7])
    y = np.array([0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    return np.stack([x, np.ones_like(x)], 1), y


def main() -> None:
    import jax
    import numpyro
    import numpyro.distributions as dist
    from numpyro.diagnostics import effective_sample_size, gelman_rubin
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    x, y = records()

    def model() -> None:
        coefficients = numpyro.sample("coefficients", dist.Normal(0, PRIOR_SCALE).expand([2]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ coefficients), obs=y)

    kernel = NUTS(model, target_accept_prob=0.95)
    run = MCMC(kernel, num_warmup=WARM_UP, num_samples=DRAWS, num_chains=CHAINS, progress_bar=False)
    run.run(jax.random.PRNGKey(0))
    grouped = np.asarray(run.get_samples(group_by_chain=True)["coefficients"])
    draws = grouped.reshape(-1, 2)
    centred = (draws - draws.mean(0)) / draws.std(0)
    found = {
        "mean": draws.mean(0),
        "deviation": draws.std(0),
        "skewness": (centred**3).mean(0),
        "quantiles": np.quantile(draws, LEVELS, axis=0),
        "r_hat": gelman_rubin(grouped),
        "effective_draws": effective_sample_size(grouped),
    }
    path = Path(__file__).with_name("nuts_logistic.npz")
    np.savez(path, x=x, y=y, prior_scale=PRIOR_SCALE, levels=np.array(LEVELS), **found)


if __name__ == "__main__":
    main()
