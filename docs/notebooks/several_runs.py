# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Several runs as one frame
# `hpcpace.load_many` returns a row for each run, with its speed, its conditions, its verdict and where the step goes.
# These are the two runs of `make demo`; a folder with a hundred runs is read the same way.

# %%
# %matplotlib inline
from pathlib import Path

import numpy as np

import hpcpace

runs = hpcpace.load_many("runs/demo")
runs.index = [Path(path).name for path in runs.path]
runs[["world_size", "mesh", "samples_per_s", "samples_unit", "cv", "mode"]].round(3)

# %% [markdown]
# ## Where does the difference come from?
# The parts of the mean step show it without a look at a single trace. Waiting is a symptom: compare own work first.

# %%
names = ["data", "forward", "backward", "optimizer", "sync_wait", "sync_transfer", "wait", "transfer", "other"]
parts_ms = runs[[f"{name}_ns" for name in names]].set_axis(names, axis="columns") / 1e6
table = parts_ms.T.assign(difference=parts_ms.loc["slow-rank-2"] - parts_ms.loc["clean"]).round(1)
table.rename_axis("part, ms a step")

# %%
shown = parts_ms.loc[:, parts_ms.max() > 0.005 * parts_ms.sum(axis=1).max()]
axes = shown.plot.barh(stacked=True, figsize=(9, 2.4))
axes.set_xlabel("ms a step, mean over ranks")
axes.set_ylabel("")
axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
axes.figure

# %% [markdown]
# ## Is the difference more than noise?
# The frames of both runs have their step times. Resampling blocks of ten steps keeps what neighbours have in common.
# `hpcpace compare A B` gives intervals for every part, host and role.

# %%
rng, block, num_samples = np.random.default_rng(1), 10, 2000
medians = {}
for name, path in runs.path.items():
    times_ns = hpcpace.load(path).steps.drop_duplicates("step").step_time_ns.to_numpy()
    begins = rng.integers(0, len(times_ns) - block + 1, (num_samples, len(times_ns) // block))
    resampled = times_ns[(begins[..., None] + np.arange(block)).reshape(num_samples, -1)]
    medians[name] = np.median(resampled, axis=1)
low, middle, high = np.quantile(medians["slow-rank-2"] / medians["clean"], (0.025, 0.5, 0.975))
print(f"steps of slow-rank-2 take {middle:.2f} times as long (95 %: {low:.2f} to {high:.2f})")
