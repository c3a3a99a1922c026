// Multiple-choice questions as MMLU and ARC are distributed, worded as lm-evaluation-harness words them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tapetune {

struct ChoiceQuestion {
  std::size_t part = 0;              // of the task
  std::string text;                  // up to "Answer:"
  std::vector<std::string> choices;  // one follows, after a space
  std::size_t answer = 0;
};

struct ChoicePart {
  std::string name, group;  // group: empty where a task has none
  std::string header;       // before each question: the subject, and solved questions
};

struct ChoiceTask {
  std::string name;
  std::int64_t shots = 0;
  std::vector<std::string> groups;  // in the order to show them in
  std::vector<ChoicePart> parts;
  std::vector<ChoiceQuestion> questions;  // by part
};

struct ChoiceSource {
  std::string task;                   // mmlu or arc
  std::filesystem::path data;         // mmlu: the folder with dev and test; arc: a file
  std::string split = "test";         // mmlu: the folder with the questions
  std::vector<std::string> subjects;  // mmlu: only these; empty: all
  std::int64_t shots = -1;            // solved questions before each; negative: 5 for mmlu, 0 for arc
  std::filesystem::path shots_from;   // arc: the file with solved questions
  std::int64_t limit = 0;             // the first questions of each part; 0: all
};

// Fails with file and line where something is not as it should be.
ChoiceTask read_task(const ChoiceSource& source);

// Rows of comma-separated values, with the line each begins in; quotes hold commas, line ends and doubled quotes.
struct CsvRow {
  std::int64_t line = 0;
  std::vector<std::string> cells;
};
std::vector<CsvRow> parse_csv(std::string_view text, std::string_view where);

}  // namespace tapetune
