"""The program of docs/first_job.md grows by its diffs alone, and ends as the page shows it."""

import first_job_page as page


def test_the_diffs_make_the_whole_program():
    made = page.programs()
    assert len(made) == 5
    assert made[-1] == page.whole_program()


def test_each_program_is_one():
    for number, text in enumerate(page.programs()):
        compile(text, f"step {number}", "exec")
