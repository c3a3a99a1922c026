// The known word that a wrong one probably meant.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace tapetune {

// Empty where none is near enough to be meant.
std::string nearest(std::string_view word, std::span<const std::string_view> known);

// " (did you mean X?)" for the end of a message, or nothing.
std::string did_you_mean(std::string_view word, std::span<const std::string_view> known);

}  // namespace tapetune
