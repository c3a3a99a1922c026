// Catch2 version 2 (Debian 12) or 3 (Debian 13, Ubuntu 24.04), under the same names.
#pragma once

#ifdef TAPETUNE_CATCH2_V2
#include <catch2/catch.hpp>
using Catch::Matchers::Contains;
#else
#include <catch2/catch_all.hpp>
using Catch::Approx;
inline auto Contains(const std::string& part) { return Catch::Matchers::ContainsSubstring(part); }
#endif
