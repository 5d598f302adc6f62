# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Find a straggler in frames
# `make demo` trains a tiny GPT-2 on four ranks twice. In `runs/demo/slow-rank-2`, rank 2 does its computation twice.
# The report names it; here is how to see it in the data. To follow along with a run of your own, change the path.

# %%
# %matplotlib inline
import hpcpace

run = hpcpace.load("runs/demo/slow-rank-2")
print(run.verdict.headline)

# %% [markdown]
# ## Whose own work is longest?
# Own work is what a rank does without waiting for others, so a late rank cannot hide behind those that wait for it.
# `excess_ns` is own work beyond the median of the other ranks that do the same.

# %%
names = ["work_ns", "excess_ns", "exposed_wait_ns", "exposed_transfer_ns"]
by_rank = run.parts.groupby("rank")[names].mean() / 1e6
by_rank.columns = ["own work, ms", "excess, ms", "exposed wait, ms", "exposed transfer, ms"]
by_rank.round(1)

# %% [markdown]
# ## Is it late in every step?
# A persistent straggler is a dark row. Jitter would be scattered cells, a stall of the whole job a dark column.

# %%
hpcpace.plots.lateness(run).figure

# %%
late = run.parts.pivot(index="step", columns="rank", values="excess_ns").idxmax(axis="columns")
late.value_counts(normalize=True).rename("share of steps with the largest excess")

# %% [markdown]
# ## Who waits for whom?
# `late_rank` is the last rank to enter a collective. Waiting for it is what the others lose.

# %%
held_up = run.collectives.query("late_rank >= 0")
waits = held_up.groupby(["late_rank", "rank"]).exposed_wait_ns.sum().unstack() / run.num_steps / 1e6
waits.round(1).rename_axis(index="waiting for rank", columns="ms a step of rank")

# %% [markdown]
# ## Which phase?
# The excess of each phase says what to look at: the computation, the data or something outside of all phases.

# %%
names = ["data_ns", "forward_ns", "backward_ns", "optimizer_ns", "other_ns"]
phases_ms = run.parts.groupby("rank")[names].mean().rename(columns=lambda name: name.removesuffix("_ns")) / 1e6
(phases_ms - phases_ms.median()).round(1)

# %% [markdown]
# ## One step, lane by lane

# %%
hpcpace.plots.timeline(run).figure
