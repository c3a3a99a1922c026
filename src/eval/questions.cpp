#include "eval/questions.h"

#include <array>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/nearest.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 2> task_names{"mmlu", "arc"};
constexpr std::string_view letters = "ABCD";

// The groups of MMLU's subjects, as lm-evaluation-harness has them: it counts anatomy as STEM, MMLU's authors as other.
const std::vector<std::pair<std::string_view, std::vector<std::string_view>>> mmlu_groups{
    {"humanities",
     {"formal_logic", "high_school_european_history", "high_school_us_history", "high_school_world_history",
      "international_law", "jurisprudence", "logical_fallacies", "moral_disputes", "moral_scenarios", "philosophy",
      "prehistory", "professional_law", "world_religions"}},
    {"social sciences",
     {"econometrics", "high_school_geography", "high_school_government_and_politics", "high_school_macroeconomics",
      "high_school_microeconomics", "high_school_psychology", "human_sexuality", "professional_psychology",
      "public_relations", "security_studies", "sociology", "us_foreign_policy"}},
    {"STEM",
     {"abstract_algebra", "anatomy", "astronomy", "college_biology", "college_chemistry", "college_computer_science",
      "college_mathematics", "college_physics", "computer_security", "conceptual_physics", "electrical_engineering",
      "elementary_mathematics", "high_school_biology", "high_school_chemistry", "high_school_computer_science",
      "high_school_mathematics", "high_school_physics", "high_school_statistics", "machine_learning"}},
    {"other",
     {"business_ethics", "clinical_knowledge", "college_medicine", "global_facts", "human_aging", "management",
      "marketing", "medical_genetics", "miscellaneous", "nutrition", "professional_accounting", "professional_medicine",
      "virology"}}};

std::string group_of(const std::string& subject, const fs::path& file) {
  for (const auto& [group, subjects] : mmlu_groups) {
    if (std::find(subjects.begin(), subjects.end(), subject) != subjects.end()) return std::string(group);
  }
  fail("eval", "{}: {} is not one of MMLU's 57 subjects; rename or remove the file.", file.string(), subject);
}

std::string stripped(std::string_view text) {
  constexpr std::string_view space = " \t\r\n\v\f";
  const std::size_t begin = text.find_first_not_of(space);
  if (begin == std::string_view::npos) return {};
  return std::string(text.substr(begin, text.find_last_not_of(space) + 1 - begin));
}

std::string solved(const ChoiceQuestion& question) {
  return fmt::format("{} {}\n\n", question.text, question.choices[question.answer]);
}

std::string solved(const std::vector<ChoiceQuestion>& questions, std::int64_t shots, const fs::path& file) {
  if (shots > static_cast<std::int64_t>(questions.size())) {
    fail("eval", "{}: has {} questions, too few for {} few-shot examples; lower --shots.", file.string(),
         questions.size(), shots);
  }
  std::string text;
  for (std::int64_t i = 0; i < shots; ++i) text += solved(questions[static_cast<std::size_t>(i)]);
  return text;
}

// With or without a row of column names; the answer is a letter, or counted from 0.
std::vector<ChoiceQuestion> read_mmlu_file(const fs::path& file) {
  std::vector<ChoiceQuestion> questions;
  for (const CsvRow& row : parse_csv(read_text(file), file.string())) {
    if (row.cells.size() != 6) {
      fail("eval", "{}: line {} has {} columns, but must have 6: the question, four choices and the answer.",
           file.string(), row.line, row.cells.size());
    }
    const std::string answer = stripped(row.cells[5]);
    if (row.line == 1 && answer == "answer") continue;
    const std::size_t letter = letters.find(answer), digit = std::string_view("0123").find(answer);
    if (answer.size() != 1 || (letter == std::string_view::npos && digit == std::string_view::npos)) {
      fail("eval", "{}: line {} has the answer \"{}\", but it must be A to D, or 0 to 3.", file.string(), row.line,
           answer);
    }
    ChoiceQuestion question;
    question.text = stripped(row.cells[0]);
    for (std::size_t i = 0; i < letters.size(); ++i) {
      question.text += fmt::format("\n{}. {}", letters[i], row.cells[i + 1]);
      question.choices.emplace_back(1, letters[i]);
    }
    question.text += "\nAnswer:";
    question.answer = letter != std::string_view::npos ? letter : digit;
    questions.push_back(std::move(question));
  }
  if (questions.empty()) fail("eval", "{}: has no question.", file.string());
  return questions;
}

void append(ChoiceTask& task, ChoicePart part, std::vector<ChoiceQuestion> questions, std::int64_t limit) {
  if (limit > 0) questions.resize(std::min(questions.size(), static_cast<std::size_t>(limit)));
  for (ChoiceQuestion& question : questions) {
    question.part = task.parts.size();
    task.questions.push_back(std::move(question));
  }
  task.parts.push_back(std::move(part));
}

std::vector<std::string> mmlu_subjects(const ChoiceSource& source) {
  const std::string ending = fmt::format("_{}.csv", source.split);
  std::vector<std::string> all;
  std::error_code status;
  for (const auto& entry : fs::directory_iterator(source.data / source.split, status)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(ending)) all.push_back(name.substr(0, name.size() - ending.size()));
  }
  if (all.empty()) {
    fail("eval", "{}: has no {}/SUBJECT{}; give the folder of MMLU's distribution.", source.data.string(), source.split,
         ending);
  }
  std::sort(all.begin(), all.end());
  for (const std::string& wanted : source.subjects) {
    if (std::find(all.begin(), all.end(), wanted) != all.end()) continue;
    const std::string meant = nearest(wanted, std::vector<std::string_view>(all.begin(), all.end()));
    fail("eval", "{}: has no subject \"{}\"{}.", source.data.string(), wanted,
         meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant));
  }
  return source.subjects.empty() ? all : source.subjects;
}

ChoiceTask read_mmlu(const ChoiceSource& source) {
  if (!source.shots_from.empty())
    fail("eval", "mmlu takes its few-shot examples from its dev split; drop --shots-from.");
  ChoiceTask task{"mmlu", source.shots < 0 ? 5 : source.shots, {}, {}, {}};
  for (const auto& [group, subjects] : mmlu_groups) task.groups.emplace_back(group);
  for (const std::string& subject : mmlu_subjects(source)) {
    const fs::path file = source.data / source.split / fmt::format("{}_{}.csv", subject, source.split);
    std::string spaced = subject;
    std::replace(spaced.begin(), spaced.end(), '_', ' ');
    ChoicePart part{subject, group_of(subject, file), {}};
    part.header = fmt::format("The following are multiple choice questions (with answers) about {}.\n\n", spaced);
    if (task.shots > 0) {
      const fs::path dev = source.data / "dev" / fmt::format("{}_dev.csv", subject);
      part.header += solved(read_mmlu_file(dev), task.shots, dev);
    }
    append(task, std::move(part), read_mmlu_file(file), source.limit);
  }
  return task;
}

// Either of the two forms that ARC comes in: AI2's {question: {stem, choices: [{text, label}]}, answerKey}, and
// {question, choices: {text, label}, answerKey}.
ChoiceQuestion arc_question(const Json& json, const std::string& where) {
  ChoiceQuestion question;
  std::vector<std::string> labels;
  std::string key;
  try {
    const Json& asked = json.at("question");
    question.text =
        fmt::format("Question: {}\nAnswer:", (asked.is_object() ? asked.at("stem") : asked).get<std::string>());
    if (asked.is_object()) {
      for (const Json& choice : asked.at("choices")) {
        question.choices.push_back(choice.at("text").get<std::string>());
        labels.push_back(choice.at("label").get<std::string>());
      }
    } else {
      question.choices = json.at("choices").at("text").get<std::vector<std::string>>();
      labels = json.at("choices").at("label").get<std::vector<std::string>>();
    }
    key = json.at("answerKey").get<std::string>();
  } catch (const nlohmann::json::exception& error) {
    fail("eval", "{}: is not an ARC question (question, choices with text and label, answerKey): {}.", where,
         error.what());
  }
  question.answer = static_cast<std::size_t>(std::find(labels.begin(), labels.end(), key) - labels.begin());
  if (labels.size() != question.choices.size() || labels.size() < 2 || question.answer == labels.size()) {
    fail("eval", "{}: the answer {} is none of the labels {} of {} choices.", where, key, fmt::join(labels, ", "),
         question.choices.size());
  }
  return question;
}

// A JSON object a line, or all in one array.
std::vector<ChoiceQuestion> read_arc_file(const fs::path& file) {
  const std::string text = read_text(file);
  std::vector<ChoiceQuestion> questions;
  if (stripped(std::string_view(text).substr(0, text.find('\n'))).starts_with('[')) {
    for (const Json& one : parse_json(text, "eval", file.string())) {
      questions.push_back(arc_question(one, fmt::format("{}: question {}", file.string(), questions.size() + 1)));
    }
  } else {
    std::int64_t line = 0;
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      const std::string_view one = std::string_view(text).substr(begin, end - begin);
      const std::string where = fmt::format("{}: line {}", file.string(), ++line);
      if (!stripped(one).empty()) questions.push_back(arc_question(parse_json(one, "eval", where), where));
      begin = end + 1;
    }
  }
  if (questions.empty()) fail("eval", "{}: has no question.", file.string());
  return questions;
}

ChoiceTask read_arc(const ChoiceSource& source) {
  if (!source.subjects.empty()) fail("eval", "arc has no subjects; drop --subjects.");
  ChoiceTask task{"arc", std::max<std::int64_t>(0, source.shots), {}, {}, {}};
  ChoicePart part{source.data.stem().string(), {}, {}};
  if (task.shots > 0) {
    if (source.shots_from.empty())
      fail("eval", "--shots {} needs a file with the examples; give --shots-from.", task.shots);
    part.header = solved(read_arc_file(source.shots_from), task.shots, source.shots_from);
  }
  append(task, std::move(part), read_arc_file(source.data), source.limit);
  return task;
}

}  // namespace

std::vector<CsvRow> parse_csv(std::string_view text, std::string_view where) {
  std::vector<CsvRow> rows;
  std::int64_t line = 1, opened = 0;
  bool quoted = false, begun = false;  // within quotes; within a row
  const auto row = [&]() -> CsvRow& {
    if (!begun) rows.push_back({line, {std::string()}});
    begun = true;
    return rows.back();
  };
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') ++line;
    if (quoted) {
      if (c != '"') {
        row().cells.back() += c;
      } else if (i + 1 < text.size() && text[i + 1] == '"') {
        row().cells.back() += text[++i];
      } else {
        quoted = false;
      }
    } else if (c == '"' && row().cells.back().empty()) {
      quoted = true;
      opened = line;
    } else if (c == ',') {
      row().cells.emplace_back();
    } else if (c == '\n') {
      begun = false;
    } else if (c != '\r' || (i + 1 < text.size() && text[i + 1] != '\n')) {
      row().cells.back() += c;
    }
  }
  if (quoted) fail("eval", "{}: the quotation mark of line {} is never closed.", where, opened);
  return rows;
}

ChoiceTask read_task(const ChoiceSource& source) {
  if (source.task == "mmlu") return read_mmlu(source);
  if (source.task == "arc") return read_arc(source);
  const std::string meant = nearest(source.task, task_names);
  fail("eval", "there is no task \"{}\"; there are {}{}.", source.task, fmt::join(task_names, ", "),
       meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant));
}

}  // namespace tapetune
