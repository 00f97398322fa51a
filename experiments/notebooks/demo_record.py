# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading a record of the main job
#
# `make demo` leaves a `record.json`. This notebook reads one: the file that `KVMEM_RECORD` names, or else the
# newest committed one. Open it with jupytext, or run `jupytext --to ipynb demo_record.py`.

# %%
import os

import pandas as pd

from experiments import aggregate

pd.set_option("display.max_rows", None)
named = os.environ.get("KVMEM_RECORD")
record = aggregate.read(named) if named else aggregate.newest("reproduce").record
{key: record[key] for key in ("status", "created_utc", "git", "devices", "weights", "seeds")}

# %% [markdown]
# ## Claims by section and status
#
# `matches` is for arithmetic alone. `measured` puts a number from other hardware beside the published one.
# `contradicted` is what the account says and its own numbers deny. Everything else is open, with a reason.

# %%
claims = aggregate.claims_frame(record)
claims.groupby(["section", "status"]).size().unstack(fill_value=0)

# %%
# One row is known to differ: no memory fraction is published for GLM, see its note.
assert set(claims.index[claims.status == "differs"]) <= {"glm.capacity"}
assert claims.ours.notna().eq(claims.status != "open").all()
claims[claims.status != "open"][["published", "ours", "unit", "how", "status"]]

# %% [markdown]
# ## Why the rest is open

# %%
claims[claims.status == "open"].groupby("why").size().sort_values(ascending=False)

# %% [markdown]
# ## The published quality differences against what one run can resolve
#
# Each pair of scores as whole counts: the change in answers right, and how many items it would take to settle
# a difference of that size if 5 % of the answers change.

# %%
metrics = aggregate.metrics_frame(record)
forensics = metrics[metrics.index.str.match(r"forensics\.\w+.*\.(items|z|items_to_settle)$")]
forensics["value"].round(2)
