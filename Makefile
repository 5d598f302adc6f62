# make demo and make test work on a fresh machine: each makes .venv and installs what it needs, without root.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv/.installed-bench
DEMO := runs/demo
DEMO_OPTIONS := --ranks 4 --batch-size 32 --steps 50 --shared-cores

.PHONY: install demo test test-compute test-full test-lab test-nightly sanitize gpu first-light-rehearsal lint bench bench-quick drills score nano-cluster studies pacing golden docs clean

install: $(STAMP)

# Without a C++ compiler the last line is a warning: collectives are observed by the layer in Python, and reports take
# numpy alone, and longer, and an abort costs the rows of the last second.
$(STAMP): pyproject.toml constraints.txt setup.py hpcpace/lab/host_clock.cpp hpcpace/metrics/kernels.cpp hpcpace/observe/aborts.cpp hpcpace/observe/collectives/layer.cpp
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,mpich,analysis,import,timeline,topology,dev]'
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# Trains twice, clean and with one slow rank, and prints both reports. There may be fewer cores than ranks, and other work
# on them, so the reports mention that ranks share cores and look for other causes (--shared-cores).
demo: $(STAMP)
	@rm -rf $(DEMO)
	@$(BIN)/hpcpace train gpt2 $(DEMO_OPTIONS) --run-dir $(DEMO)/clean --report
	@$(BIN)/hpcpace train gpt2 $(DEMO_OPTIONS) --run-dir $(DEMO)/slow-rank-2 --report \
	  --inject rank=2,phase=compute,size=100%

$(DEMO)/slow-rank-2/summary.json:
	@$(MAKE) demo

# Needs Python alone: no root, no network, no Slurm. Says at its end what it left out.
test: $(STAMP)
	@$(BIN)/python -m pytest -n auto --dist loadfile -m 'not slow and not compute and not tool and not root and not slurm and not gpu'

# Tests that compute for minutes, on all cores.
test-compute: $(STAMP)
	@$(BIN)/python -m pytest -n auto -m compute tests/unit

# The slow tests, and those that need hwloc, Chromium or Slurm's commands. Three at a time on two cores: their ranks wait
# for each other, for timeouts and for hangs.
test-full: $(STAMP)
	@$(BIN)/python -m pytest -n $$(( ($$(nproc) * 3 + 1) / 2 )) --dist loadfile -m '(slow or tool) and not root and not slurm and not gpu'

# Root, and a Slurm that it boots by itself.
test-lab: $(STAMP)
	$(BIN)/python -m pytest -m 'root or slurm' tests

# All cases of each table that the tests above take a choice of: about an hour and a half, for every night.
test-nightly: $(STAMP)
	@$(BIN)/python -m pytest --all-seeds -n auto --dist loadfile -m 'not root and not slurm and not gpu'
	@test $$(id -u) -ne 0 || $(BIN)/python -m pytest --all-seeds -m 'root or slurm' tests

# The tests of the kernels, built with sanitizers of addresses and of undefined behaviour. Needs g++.
sanitize: $(STAMP)
	rm -rf build/sanitized && mkdir -p build/sanitized
	cp -r hpcpace experiments pyproject.toml tests build/sanitized
	rm -f build/sanitized/hpcpace/metrics/_kernels*
	g++ -std=c++20 -O1 -g -fwrapv -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=undefined \
	  -fno-sanitize=signed-integer-overflow -shared -fPIC hpcpace/metrics/kernels.cpp \
	  -DSOURCE_CHECK=$$($(BIN)/python -c 'import zlib; print(zlib.crc32(open("hpcpace/metrics/kernels.cpp", "rb").read()))')u \
	  -o build/sanitized/hpcpace/metrics/_kernels.so
	cd build/sanitized && ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$$(g++ -print-file-name=libasan.so) PYTHONPATH=$$PWD \
	  $(CURDIR)/$(BIN)/python -m pytest tests/unit/metrics

# A GPU, and a torch with CUDA. With those, `.venv/bin/python -m experiments.bench --gpu` measures (docs/results/performance.md).
gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu tests/gpu

# What docs/results/gpu.md measures on a GPU, on CPUs: with torch 2.11 as on that machine, whose Python is 3.12 (PYTHON names one).
REHEARSAL := build/first-light-python
$(REHEARSAL)/.installed:
	$(PYTHON) -m venv --clear $(REHEARSAL)
	$(REHEARSAL)/bin/python -m pip install --quiet torch==2.11.0 torchvision==0.26.0 mpi4py h5py numpy click \
	  transformers 'setuptools<82'
	@touch $@

first-light-rehearsal: $(REHEARSAL)/.installed
	PYTHON=$(REHEARSAL)/bin/python experiments/gpu/first_light.sh --wheels
	PYTHON=$(REHEARSAL)/bin/python experiments/gpu/first_light.sh --rehearse

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck sbatch/*.sh docs/health-checks/*.sh experiments/gpu/*.sh .ci/run .ci/with_python

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group bench
	@touch $@

# All benchmarks that docs/results/performance.md has: about half an hour. Timings never fail, a benchmark that does not run does.
bench: $(BENCH_STAMP)
	$(BIN)/python -m experiments.bench

# Each benchmark in a small size, as many at a time as there are cores: shows that they still run. Together they take
# about five minutes of processor time.
bench-quick: $(BENCH_STAMP)
	$(BIN)/python -m experiments.bench --quick

# Root and Slurm, about 25 minutes: each fault five times, which writes docs/results/reliability.md; then the requeue of each
# workload near its time limit.
drills: $(STAMP)
	$(BIN)/python -m experiments.drills
	HPCPACE_ALL_REQUEUES=1 $(BIN)/python -m pytest -s tests/lab/test_requeue.py

# The diagnosis against known truth, about an hour and a half on 2 cores: writes docs/results/diagnosis-score.md.
score: $(STAMP)
	$(BIN)/python -m experiments.score --seeds report --per-cell 300 --write

# Root and Slurm, about 70 minutes: both studies in the lab, resumable; writes docs/results/studies-lab.md.
nano-cluster: $(STAMP)
	$(BIN)/python -m experiments.studies --write

# Root and Slurm: all studies, one after the other, each resumable and each a page of docs/results/; about three hours.
studies: nano-cluster
	$(BIN)/python -m experiments.studies --scaling --write
	$(BIN)/python -m experiments.techniques --write
	$(BIN)/python -m experiments.pacing hosts --write

# Root and Slurm, under 40 minutes on a quiet machine and, by estimate, as long again for `hosts`: what pacing does where
# it was tried; writes docs/results/pacing-experiments.md.
pacing: $(STAMP)
	$(BIN)/python -m experiments.pacing --write

# The guide as a site, with links and anchors checked, in build/site, and manual pages of all commands in build/man.
# Search needs a server: python -m http.server --directory build/site
# The notebooks of the guide run on the demo.
# `make docs VERSION=0.1` puts the site of that version on the branch `site` instead, next to those of earlier versions.
docs: $(STAMP) | $(DEMO)/slow-rank-2/summary.json
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
ifdef VERSION
	NO_MKDOCS_2_WARNING=1 PATH=$(CURDIR)/$(BIN):$$PATH mike deploy --branch site --update-aliases $(VERSION) latest
	PATH=$(CURDIR)/$(BIN):$$PATH mike set-default --branch site latest
else
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
endif
	$(BIN)/python docs/manual.py build/man

clean:
	rm -rf .venv build *.egg-info
