// Catch2 version 2 (Debian 12, Ubuntu 22.04) or 3, under one name.
#pragma once

#ifdef TAPETUNE_CATCH2_V2
#include <catch2/catch.hpp>
using Catch::Matchers::Contains;
#else
#include <catch2/catch_all.hpp>
inline auto Contains(const std::string& part) { return Catch::Matchers::ContainsSubstring(part); }
#endif
