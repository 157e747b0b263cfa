// The parts of a page by which a job is controlled and diagnosed.
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "page.hpp"
#include "ring_of_entries.hpp"
#include "text_fields.hpp"

namespace ringcomm {

bool MappedPage::take_mailbox(int pid) {
  Page::Mailbox& box = page_->mailbox;
  std::int32_t owner = box.owner.load();
  const bool is_free = owner == 0 || (kill(owner, 0) != 0 && errno == ESRCH);
  if (!is_free || !box.owner.compare_exchange_strong(owner, pid)) return false;
  const Mail mail = box.mail.load();
  if (mail == Mail::asked || mail == Mail::taken) {  // of an owner that has died: it still counts
    box.owner.store(0);
    return false;
  }
  box.mail.store(Mail::written);
  return true;
}

void MappedPage::put_command(const std::string& text) {
  store_text(page_->mailbox.command, text);
  page_->mailbox.mail.store(Mail::asked);
}

bool MappedPage::withdraw_command() {
  Mail expected = Mail::asked;
  return page_->mailbox.mail.compare_exchange_strong(expected, Mail::written);
}

void MappedPage::give_mailbox_back() {
  const Mail mail = page_->mailbox.mail.load();
  if (mail == Mail::written || mail == Mail::answered) page_->mailbox.mail.store(Mail::free);
  page_->mailbox.owner.store(0);
}

std::string MappedPage::answer() const { return load_text(page_->mailbox.answer); }

std::string MappedPage::take_command() {
  Mail expected = Mail::asked;
  if (!page_->mailbox.mail.compare_exchange_strong(expected, Mail::taken)) return "";
  return load_text(page_->mailbox.command);
}

void MappedPage::answer_command(const std::string& text) {
  store_text(page_->mailbox.answer, text);
  page_->mailbox.mail.store(Mail::answered);
}

void MappedPage::note_step(const StepView& view) {
  append(page_->steps, page_->n_steps, [&](Page::Step& step) {
    std::copy(std::begin(view.marks_ns), std::end(view.marks_ns), step.marks_ns);
    std::copy(std::begin(view.no_core_ns), std::end(view.no_core_ns), step.no_core_ns);
  });
}

std::vector<StepView> MappedPage::steps() const {
  return entries(page_->steps, page_->n_steps, [](const Page::Step& step) {
    StepView view{};
    view.number = step.turn.load() - 1;
    std::copy(std::begin(step.marks_ns), std::end(step.marks_ns), view.marks_ns);
    std::copy(std::begin(step.no_core_ns), std::end(step.no_core_ns), view.no_core_ns);
    return view;
  });
}

}  // namespace ringcomm
