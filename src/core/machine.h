// Where and when something was measured, for people and for records.
#pragma once

#include <string>

namespace tapetune {

// "AMD EPYC 7763 64-Core Processor, 2 cores, 8 GB": the processor, the cores that this process may use, and the memory.
std::string machine_name();

// "2026-01-31T12:00:00Z": now, in UTC.
std::string utc_time();

}  // namespace tapetune
