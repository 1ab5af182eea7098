"""Draw SVG pictures without a library: `svg` draws, `axes` computes positions, `colours` maps values to colours."""
