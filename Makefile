# Entry points for developers and CI: make build | test | lint | up | bench | test-vm.

# Outside the tree, so that a fresh clone reuses earlier build results.
export CARGO_TARGET_DIR ?= $(HOME)/.cache/skiff/target

# Data directory and port of `make up`.
DATA ?= $(CURDIR)/.skiff
PORT ?= 6443

.PHONY: build test test-vm lint up bench packages

build:
	SKIFF_COMMIT=$$(git rev-parse HEAD 2>/dev/null || echo unknown) SKIFF_BUILD_DATE=$$(TZ=UTC git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd 2>/dev/null || echo unknown) \
		cargo build --release --package skiff

# Runs in CI: formatting, lints, `cargo xtask tidy`, and all tests.
# Without a build before it: that would compile every crate once more, with other features.
test: packages lint
	@echo cargo test --doc --workspace; cargo test --quiet --doc --workspace >/dev/null
	@if cargo nextest --version >/dev/null 2>&1; then \
		echo cargo nextest run --workspace --no-fail-fast; cargo nextest run --workspace --no-fail-fast; \
	else \
		echo "cargo-nextest is not installed, using cargo test"; cargo test --workspace; \
	fi

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo xtask tidy
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps --document-private-items
	@if cargo deny --version >/dev/null 2>&1; then echo cargo deny check; cargo deny check bans licenses sources; \
	else echo cargo xtask deny; cargo xtask deny; fi

# Runs a cluster on this machine until Ctrl-C: as root one node that runs real containers, otherwise three simulated
# nodes.
NODES ?= $(shell [ $$(id -u) = 0 ] || echo "--disable-agent --simulate 3")
up: build
	@mkdir -p "$(DATA)"
	@echo "kubeconfig: $(DATA)/kubeconfig.yaml    in another terminal:"
	@echo "    export KUBECONFIG=$(DATA)/kubeconfig.yaml"
	@echo "    kubectl get nodes"
	@echo "    $(CARGO_TARGET_DIR)/release/skiff image import -d $(DATA)/server FILE"
	@exec "$(CARGO_TARGET_DIR)/release/skiff" server $(NODES) --data-dir "$(DATA)/server" \
		--write-kubeconfig "$(DATA)/kubeconfig.yaml" --bind-address 127.0.0.1 --https-listen-port $(PORT)

# Tests the release binary in a Debian 12 guest (systemd, cgroup v2, AppArmor); see vm/README.md. TESTS="reset 11-"
# selects tests by name.
test-vm: build
	@vm/run $(TESTS)

# Prints one result per line and all results as JSON on the last; see bench/README.md. ARGS="--compare earlier.txt".
bench: build
	cargo run --release --package bench -- $(ARGS)

# Installs the Debian packages that the build and the tests need, if any is missing.
packages:
	@.ci/packages
