# make demo and make test work on a fresh machine: each makes .venv and installs what it needs, without root.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEMO := runs/demo

.PHONY: install demo test test-full test-lab gpu lint bench drills score nano-cluster pacing golden clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,mpich,analysis,dev]'
	@touch $@

# Trains twice, clean and with one slow rank, and prints both reports.
demo: $(STAMP)
	@rm -rf $(DEMO)
	@$(BIN)/hpcpace train gpt2 --ranks 4 --mesh dp=2,pp=2 --steps 120 --run-dir $(DEMO)/clean --report
	@$(BIN)/hpcpace train gpt2 --ranks 4 --mesh dp=2,pp=2 --steps 120 --run-dir $(DEMO)/slow-rank-2 --report \
	  --inject rank=2,phase=compute,size=30%

# Needs Python alone: no root, no network, no Slurm. Says at its end what it left out.
test: $(STAMP)
	@$(BIN)/python -m pytest -n auto --dist loadfile -m 'not slow and not tool and not root and not slurm and not gpu'

# The slow tests, and those that need hwloc, Chromium or Slurm's commands.
test-full: $(STAMP)
	@$(BIN)/python -m pytest -m '(slow or tool) and not root and not slurm and not gpu'

# Root, and a Slurm that it boots by itself.
test-lab: $(STAMP)
	$(BIN)/python -m pytest -m 'root or slurm' tests

# A GPU, and a torch with CUDA.
gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu tests/gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck sbatch/*.sh .ci/run

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,mpich,analysis,dev,bench]'
	$(BIN)/python -m experiments.bench

# Root and Slurm, about 25 minutes: each fault five times, which writes docs/reliability.md; then the requeue of each
# workload near its time limit.
drills: $(STAMP)
	$(BIN)/python -m experiments.drills
	HPCPACE_ALL_REQUEUES=1 $(BIN)/python -m pytest -s tests/lab/test_requeue.py

# The diagnosis against known truth, about 30 minutes: writes docs/diagnosis-score.md.
score: $(STAMP)
	$(BIN)/python -m experiments.score --seeds report --per-cell 300 --write

# Root and Slurm, under 40 minutes: both studies in the lab, resumable; writes docs/studies-lab.md.
nano-cluster: $(STAMP)
	$(BIN)/python -m experiments.studies --write

# Root and Slurm, under 40 minutes on a quiet machine: what pacing does where it was tried; writes
# docs/pacing-experiments.md.
pacing: $(STAMP)
	$(BIN)/python -m experiments.pacing --write

clean:
	rm -rf .venv build *.egg-info
