// The charts of a comparison.
#pragma once

#include <vector>

#include "report/chart.h"
#include "report/comparison.h"

namespace tapetune {

LineChart perplexity_chart(const Comparison& comparison, std::size_t text);
LineChart loss_chart(const Comparison& comparison);
LineChart distance_chart(const Comparison& comparison);
// Length by depth, a panel for each entry that was tested.
HeatMap passkey_map(const Comparison& comparison);
// Dot products of position states: RoPE's, which are the same in every layer, then those of layers of a TAPE entry.
HeatMap position_map(const Comparison& comparison, const Entry& entry);
// What its layers made of RoPE's, on a scale of its own: a short training changes less than the eye sees in the other.
HeatMap position_change_map(const Comparison& comparison, const Entry& entry);

// The place of an entry in the palette.
std::size_t colour_of(const Comparison& comparison, const Entry& entry);

}  // namespace tapetune
