"""Supervised data: records of chats, or of prompts with completions -> ids, and which of them are targets.

    forms.py      the common forms of records -> one form, with what is wrong with a record in words
    template.py   the chat template: rendering, plain or with marks at turns and generation blocks
    turns.py      which characters of a rendered conversation are targets
    spans.py      characters -> ids and targets
    encode.py     all of it for one process: ChatEncoder

To add a form: a function in `forms.py` that gives a Conversation or a Completion, its entry in FORMS, its name in
`DataConfig.format`; a row in the table of `tests/unit/test_chat_forms.py`.
"""
