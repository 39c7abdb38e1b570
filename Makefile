# Works with GNU Make 3.81, which macOS has, and with any sh. `make help` lists the targets.

.DEFAULT_GOAL := help
.PHONY: help demo test test/matrix test/docker test/poolers test/mutants test/faults test/fuzz soak bench generate verify \
	verify/generated verify/modules verify/format verify/queries lint fmt tidy clean ci

# The versions are pinned in internal/tools/go.mod: a module of its own, so that no host of latchkey sees
# what the tools require. The first use builds a tool, which takes minutes; Go's build cache keeps it.
TOOL := go tool -modfile="$(CURDIR)/internal/tools/go.mod"

GO_DIRS := db internal migrations queries repository tests
POSTGRES_VERSIONS := 15 16 17 18

# The Debian releases whose PgBouncer test/poolers uses: 1.18, which knows no prepared statements, and a current one.
PGBOUNCER_SUITES := bookworm forky

# For instance: make test TESTFLAGS='-run TestKeys -v'. LATCHKEY_LONG=1 in the environment makes the load tests long.
TESTFLAGS :=

# How often each fuzz test of a folder is tried, in all about a minute. A number of tries and not a time, since a time may
# be over before the seeds have been.
FUZZ := internal/lockkey=20000x repository=20000x tests=500x

# Shell code that sets race to -race if the race detector can work here.
FIND_RACE = cc=$$(go env CC); race=; \
	if [ "$$(go env CGO_ENABLED)" = 1 ] && command -v $${cc%% *} >/dev/null; then race=-race; \
	else echo "testing without -race: it needs cgo and a C compiler"; fi

GO_TEST = go test $$race -shuffle=on -count=1 $(TESTFLAGS)

# go test hides what passing tests print when it is given a list of packages, but not in the package's own
# folder. So the suite in tests/ is run there, and says which PostgreSQL it runs on.
TEST_SUITE = (cd tests && $(GO_TEST))
TEST_SUITE_SHORT = (cd tests && $(GO_TEST) -short)

# Shell code that sets status to 1 if a test of either module fails.
ALL_TESTS = status=0; \
	$(GO_TEST) ./... || status=1; \
	(cd tests && $(GO_TEST) ./internal/... ./bench ./faults) || status=1; \
	$(TEST_SUITE) || status=1

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z\/]*:.*## / { printf "  %-18s %s\n", $$1, $$2 }' Makefile

demo: ## show on a real PostgreSQL which code breaks and which holds (ARGS=-json, ARGS=-timeline=all)
	@go run ./internal/demo $(ARGS)

test: ## run all tests, on the PostgreSQL that is found or fetched
	@$(FIND_RACE); \
	echo "==> go test$${race:+ $$race}; the first run also compiles and, where no PostgreSQL is found, fetches one"; \
	$(ALL_TESTS); exit $$status

# Here and below without the race detector: make test has it, and what differs here is the server.
test/matrix: ## run the black-box tests on PostgreSQL 15, 16, 17 and 18
	@failed=; \
	for version in $(POSTGRES_VERSIONS); do \
		echo "==> PostgreSQL $$version: go test"; \
		LATCHKEY_DATABASE_URL= LATCHKEY_POSTGRES= LATCHKEY_POSTGRES_VERSION=$$version; \
		export LATCHKEY_DATABASE_URL LATCHKEY_POSTGRES LATCHKEY_POSTGRES_VERSION; \
		$(TEST_SUITE_SHORT) || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed on PostgreSQL$$failed" >&2; exit 1; fi

test/docker: ## run the black-box tests on PostgreSQL in Docker (LATCHKEY_POSTGRES_IMAGE=...)
	@echo "==> PostgreSQL in Docker: go test"; \
	LATCHKEY_DATABASE_URL= LATCHKEY_POSTGRES=docker; export LATCHKEY_DATABASE_URL LATCHKEY_POSTGRES; \
	$(TEST_SUITE_SHORT)

test/poolers: ## run the black-box tests through PgBouncer, an old and a new one (on Debian, which it fetches them from)
	@passed= failed= skipped=; \
	for suite in $(PGBOUNCER_SUITES); do \
		program="$(CURDIR)/.cache/pgbouncer/$$suite/pgbouncer"; \
		bash .ci/pgbouncer $$suite "$${program%/*}" || { skipped="$$skipped $$suite"; continue; }; \
		echo "==> through $$("$$program" --version | head -n 1) of Debian $$suite"; \
		LATCHKEY_PGBOUNCER=$$program; export LATCHKEY_PGBOUNCER; \
		if $(TEST_SUITE_SHORT); then passed="$$passed $$suite"; else failed="$$failed $$suite"; fi; \
	done; \
	echo "PgBouncer of Debian: passed:$${passed:- none}; failed:$${failed:- none}; SKIPPED:$${skipped:- none}, for reasons above"; \
	[ -z "$$failed" ] && [ -n "$$passed" ]

test/mutants: ## break the code on purpose, one way at a time, and see a test turn red
	@bash .ci/mutants

# Each target by itself, since a run fuzzes one; with one worker, which for some starts a server of its own.
test/fuzz: ## look for input that breaks what the fuzz tests say (FUZZ=tests=1h)
	@tmp=$$(mktemp -d) || exit 1; trap 'rm -rf "$$tmp"' EXIT; trap 'exit 130' INT TERM; status=0; \
	for each in $(FUZZ); do dir=$${each%%=*}; \
		(cd $$dir && go test -c -fuzz . -o "$$tmp/fuzz") || { status=1; continue; }; \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z]*\).*/\1/p' $$dir/*_test.go); do \
			echo "==> $$target in $$dir"; \
			(cd $$dir && "$$tmp/fuzz" -test.run '^$$' -test.fuzz "^$$target\$$" -test.fuzztime $${each#*=} \
				-test.parallel 1 -test.fuzzcachedir "$$tmp/cache") || status=1; \
		done; \
	done; exit $$status

test/faults: ## kill, cut, stop and cancel everything for 2 minutes, and check each call and the database
	@cd tests && go run ./faults -for 2m

soak: ## the same, for longer (FOR=1h), or one round again (SEED=...)
	@cd tests && go run ./faults -for $(or $(FOR),10m) $(if $(SEED),-seed $(SEED))

bench: ## measure latchkey beside the alternatives, in 20 minutes (BENCH=quick, in 2; BENCH=draw, draw again)
	@cd tests && go run ./bench $(BENCH)

# compile first: SQL that does not compile leaves db/ as it is.
generate: ## rebuild db/ from migrations/ and queries/
	$(TOOL) sqlc compile
	find db -name '*.go' ! -name doc.go -exec rm -f {} +
	$(TOOL) sqlc generate

verify: verify/generated verify/modules verify/format verify/queries ## check what is generated, tidy or formatted

# Compared with a copy, so it needs no git, works in a dirty tree, and sees a file whose source is gone.
verify/generated: ## check that db/ is what migrations/ and queries/ generate
	@tmp=$$(mktemp -d) || exit 1; trap 'rm -rf "$$tmp"' EXIT; trap 'exit 130' INT TERM; \
	cp -R sqlc.yaml migrations queries "$$tmp" && \
	$(TOOL) sqlc generate -f "$$tmp/sqlc.yaml" && \
	cp db/doc.go "$$tmp/db" && \
	diff -ru db "$$tmp/db" || { echo "db/ is not what migrations/ and queries/ generate: run make generate" >&2; exit 1; }

verify/modules: ## check that the go.mod files are tidy
	@status=0; for dir in . tests internal/tools; do \
		(cd $$dir && go mod tidy -diff) || { echo "$$dir/go.mod is not tidy: run make tidy" >&2; status=1; }; \
	done; exit $$status

verify/format: ## check that the Go code is formatted
	@files=$$(gofmt -l $(GO_DIRS)) || exit 1; \
	if [ -n "$$files" ]; then echo "$$files"; echo "not formatted: run make fmt" >&2; exit 1; fi

verify/queries: ## check the statements, also on a real PostgreSQL
	@cd tests && go test -count=1 -run '^TestGenerated'

lint: ## run golangci-lint on both modules
	@status=0; for dir in . tests; do \
		(cd $$dir && $(TOOL) golangci-lint run --config "$(CURDIR)/.golangci.yml") || status=1; \
	done; exit $$status

fmt: ## format the Go code
	@for dir in . tests; do \
		(cd $$dir && $(TOOL) golangci-lint fmt --config "$(CURDIR)/.golangci.yml") || exit 1; \
	done

tidy: ## tidy the go.mod files
	@for dir in . tests internal/tools; do (cd $$dir && go mod tidy) || exit 1; done

clean: ## remove the fetched PostgreSQL servers and poolers
	rm -rf .cache

ci: ## run all that CI runs (as root on Debian, it installs what it needs)
	@bash .ci/run
