"""Pictures as SVG, without a library: `svg` draws, `axes` says where values stand, `colours` which colour they have."""
