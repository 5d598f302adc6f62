# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Study jitter
# A synchronous step ends when its slowest rank arrives, so noise on any rank delays all. How much does that cost, and
# is it the same rank each time? The run is `runs/demo/clean` of `make demo`: nothing was slowed down on purpose.

# %%
# %matplotlib inline
import numpy as np

import hpcpace

run = hpcpace.load("runs/demo/clean")
print(run.verdict.headline)

# %% [markdown]
# ## How much do steps vary?

# %%
step_ms = run.steps.drop_duplicates("step").set_index("step").step_time_ns / 1e6
print(f"median {step_ms.median():.1f} ms, 95 % quantile {step_ms.quantile(0.95):.1f} ms")
print(f"coefficient of variation {step_ms.std() / step_ms.mean():.3f}")
hpcpace.plots.parts(run).figure

# %% [markdown]
# ## What does waiting for the slowest cost?
# The mean of the slowest rank over the mean of all is the amplification A of a whole step: 1 means that no rank waits.
# The report takes it between synchronisations, which is closer to the truth where ranks meet several times in a step.

# %%
work_ms = run.parts.pivot(index="step", columns="rank", values="work_ns") / 1e6
print(f"A of whole steps: {work_ms.max(axis='columns').mean() / work_ms.to_numpy().mean():.3f}")
print(f"A of the report:  {run.summary.jitter.amplification:.3f}" if run.summary.jitter else "the report has no A")

# %% [markdown]
# ## A slow rank, or another one each time?
# Take the lasting differences between ranks out. What is left is jitter proper.

# %%
jitter_ms = work_ms - (work_ms.mean() - work_ms.to_numpy().mean())
print(f"of lasting differences: {work_ms.mean().max() / work_ms.to_numpy().mean():.3f}")
print(f"of jitter proper:       {jitter_ms.max(axis='columns').mean() / jitter_ms.to_numpy().mean():.3f}")
work_ms.idxmax(axis="columns").value_counts().rename("steps in which the rank is the slowest")

# %% [markdown]
# ## Do ranks slow down together?
# Correlated work points at a shared cause, such as cores that ranks share; independent work at each rank's own noise.

# %%
work_ms.corr().round(2)

# %% [markdown]
# ## Does it recur?
# A peak of the autocorrelation at lag n means that something happens every n steps.

# %%
lags = range(1, min(20, len(step_ms) // 2))
correlation = {lag: round(float(step_ms.autocorr(lag)), 2) for lag in lags}
bound = 1.96 / np.sqrt(len(step_ms))
print(f"lags with |r| > {bound:.2f}, beyond chance:", {lag: r for lag, r in correlation.items() if abs(r) > bound})
