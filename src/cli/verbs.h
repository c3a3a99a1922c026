// One function a verb: each adds its subcommand, options and example; the work is in the libraries.
#pragma once

namespace CLI {
class App;
}

namespace tapetune::cli {

void add_adapter(CLI::App& app);
void add_check(CLI::App& app);
void add_compare(CLI::App& app);
void add_convert(CLI::App& app);
void add_data(CLI::App& app);
void add_eval(CLI::App& app);
void add_choice(CLI::App& eval);   // of eval
void add_passkey(CLI::App& eval);  // of eval
void add_export(CLI::App& app);
void add_generate(CLI::App& app);
void add_import(CLI::App& app);
void add_inspect(CLI::App& app);
void add_launch(CLI::App& app);
void add_logits(CLI::App& app);
void add_merge(CLI::App& app);
void add_plan(CLI::App& app);
void add_recipes(CLI::App& app);
void add_tokenize(CLI::App& app);
void add_train(CLI::App& app);
void add_verify(CLI::App& app);

}  // namespace tapetune::cli
