// The charts of a comparison.
#pragma once

#include <vector>

#include "compare/comparison.h"
#include "report/chart.h"

namespace tapetune {

LineChart perplexity_chart(const Comparison& comparison, std::size_t text);
LineChart loss_chart(const Comparison& comparison);
LineChart distance_chart(const Comparison& comparison);
// Accuracy by context and depth, a panel for each entry that was tested.
HeatMap passkey_map(const Comparison& comparison);
// Dot products of position states: RoPE's, the same in every layer, then those of some layers of a TAPE entry.
HeatMap position_map(const Comparison& comparison, const Entry& entry);
// Their differences from RoPE's, on a colour scale of their own: after short training they are too small to see in the
// other map.
HeatMap position_change_map(const Comparison& comparison, const Entry& entry);

// The index of an entry's colour in the palette.
std::size_t colour_of(const Comparison& comparison, const Entry& entry);

}  // namespace tapetune
