#!/usr/bin/env bash
# Builds the documentation as a site in site/, a folder for any web server. A link that leads nowhere is an error.
#
#   bash scripts/docs/build_site.sh            builds it
#   bash scripts/docs/build_site.sh --serve    shows it on http://127.0.0.1:8000, and builds pages again that change
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
show_help "$@"
cd "$(dirname "$0")/../.."
use_environment docs

export NO_MKDOCS_2_WARNING=1 # of mkdocs-material, about a later version
if [[ "${1:-}" == --serve ]]; then
  exec mkdocs serve
fi
exec mkdocs build --strict --clean --quiet "$@"
