"""Scripts that complete `stretto` in bash, zsh and fish.

All words are in the script, so that a completion starts no Python: it takes milliseconds. Run folders and recipe files
are looked for by the shell. A script is made again after an update of the package.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from stretto.cli.completion_tables import CommandTable, Kind, Option, Value

Keys = Mapping[str, Sequence[str]]


def bash(commands: Sequence[CommandTable], keys: Keys, recipes: Sequence[str]) -> str:
    """Returns the script for bash 4 or newer. It needs no other package."""
    return "\n".join([*_head("bash", "~/.bashrc"), *_bash_tables(commands, keys, recipes), _BASH])


def zsh(commands: Sequence[CommandTable], keys: Keys, recipes: Sequence[str]) -> str:
    """Returns the script for zsh."""
    return "\n".join(["#compdef stretto", *_head("zsh", "~/.zshrc"), *_zsh_tables(commands, keys, recipes), _ZSH])


def fish(commands: Sequence[CommandTable], keys: Keys, recipes: Sequence[str]) -> str:
    """Returns the script for fish."""
    lines = [*_head("fish", "~/.config/fish/config.fish"), _FISH]
    lines.append(f"set -g __stretto_recipes {_words(recipes)}")
    lines.append(f"set -g __stretto_keys {_words(f'{key}=' for key in keys)}")
    lines.append(f"set -g __stretto_values {_words(f'{key}={word}' for key, words in keys.items() for word in words)}")
    lines.append("complete -c stretto -f")
    for command in commands:
        lines.append(
            f"complete -c stretto -n __fish_use_subcommand -a {command.name} -d {shlex.quote(_plain(command.help))}"
        )
        here = f"-n '__fish_seen_subcommand_from {command.name}'"
        lines += [f"complete -c stretto {here} {_fish_option(option)}" for option in command.options]
        lines += [f"complete -c stretto {here} {_FISH_VALUES[value.kind]}" for value in command.arguments[:1]]
        lines += [f"complete -c stretto {here} -a {_quoted(value.words)}" for value in command.arguments if value.words]
    return "\n".join(lines) + "\n"


def _head(shell: str, file: str) -> list[str]:
    load = "stretto completion fish | source" if shell == "fish" else f'eval "$(stretto completion {shell})"'
    return [f"# Completion of stretto in {shell}. Put this line into {file}:", f"#     {load}", ""]


def _kinds(commands: Sequence[CommandTable]) -> Iterator[tuple[str, Value | None]]:
    """Returns `command option` with its value, and `command` with its argument's."""
    for command in commands:
        for option in command.options:
            for name in option.names:
                yield f"{command.name} {name}", option.value
        for value in command.arguments[:1]:
            yield command.name, value


def _described(value: Value | None) -> str:
    """Returns a value as a word of a table: its kind, or the words that are allowed after `words:`."""
    if value is None:
        return "none"
    return f"words:{' '.join(value.words)}" if value.kind == "words" else value.kind


def _tables(commands: Sequence[CommandTable], keys: Keys, recipes: Sequence[str], assign: str) -> Iterator[str]:
    """Returns the tables that bash and zsh share; `assign` begins an associative array."""
    yield f"_stretto_commands={shlex.quote(' '.join(command.name for command in commands))}"
    yield f"_stretto_recipes={shlex.quote(' '.join(recipes))}"
    yield f"_stretto_keys={shlex.quote(' '.join(f'{key}=' for key in keys))}"
    for name, table in (
        ("options", {c.name: " ".join(each for option in c.options for each in option.names) for c in commands}),
        ("kinds", {place: _described(value) for place, value in _kinds(commands)}),
        ("values", {key: " ".join(words) for key, words in keys.items() if words}),
    ):
        yield f"{assign} _stretto_{name}"
        yield f"_stretto_{name}=("
        for key, words in table.items():
            yield f"    {_entry(key, words, assign)}"
        yield ")"


def _entry(key: str, words: str, assign: str) -> str:
    return f"{shlex.quote(key)} {shlex.quote(words)}" if "typeset" in assign else f"[{key!r}]={shlex.quote(words)}"


def _bash_tables(commands: Sequence[CommandTable], keys: Keys, recipes: Sequence[str]) -> Iterator[str]:
    return _tables(commands, keys, recipes, "declare -gA")


def _zsh_tables(commands: Sequence[CommandTable], keys: Keys, recipes: Sequence[str]) -> Iterator[str]:
    return _tables(commands, keys, recipes, "typeset -gA")


def _words(words: Iterator[str] | Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _quoted(words: Sequence[str]) -> str:
    return shlex.quote(" ".join(words))


def _plain(help: str) -> str:
    return help.replace("%%", "%").replace("\n", " ")


def _fish_option(option: Option) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
    text = f"{names} -d {shlex.quote(_plain(option.help))}"
    if option.value is None:
        return text
    if option.value.kind == "words":
        return f"{text} -x -a {_quoted(option.value.words)}"
    return f"{text} -r {_FISH_VALUES[option.value.kind]}"


_FISH_VALUES: Mapping[Kind, str] = {
    "nothing": "-f",
    "words": "-f",
    "key": "-f -a '(__stretto_complete_keys)'",
    "recipe": "-F -a '$__stretto_recipes'",
    "run": "-f -a '(__fish_complete_directories)'",
    "folder": "-f -a '(__fish_complete_directories)'",
    "file": "-F",
}

_FISH = """\
function __stretto_complete_keys
    set -l typed (commandline -ct)
    if string match -q -- '*=*' $typed
        string match -- (string split -m 1 = $typed)[1]'=*' $__stretto_values
    else
        printf '%s\\n' $__stretto_keys
    end
end"""

_BASH = r"""
# Sets `kind` to what the current word is, and `typed` to what is typed of it so far.
_stretto() {
    local typed=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}
    local kind key IFS=$' \t\n'
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "$_stretto_commands --help --version" -- "$typed"))
        return
    fi
    # Bash makes words of their own of `=`: `--set key = value`.
    if [[ $typed == "=" ]]; then
        key=$before typed=""
    elif [[ $before == "=" ]]; then
        key=${COMP_WORDS[COMP_CWORD-2]}
    fi
    if [[ -n $key ]]; then
        if [[ $key == --* ]]; then
            before=$key
        else
            COMPREPLY=($(compgen -W "${_stretto_values[$key]}" -- "$typed"))
            return
        fi
    fi
    kind=${_stretto_kinds["$command $before"]:-none}
    if [[ $kind == none ]]; then
        if [[ $typed == -* ]]; then
            COMPREPLY=($(compgen -W "${_stretto_options[$command]}" -- "$typed"))
            return
        fi
        kind=${_stretto_kinds[$command]:-nothing}
    fi
    case $kind in
        words:*) COMPREPLY=($(compgen -W "${kind#words:}" -- "$typed")) ;;
        key)
            COMPREPLY=($(compgen -W "$_stretto_keys" -- "$typed"))
            compopt -o nospace
            ;;
        recipe)
            compopt -o filenames
            mapfile -t COMPREPLY < <(compgen -f -X '!*.toml' -- "$typed"; compgen -d -- "$typed")
            [[ $typed == */* ]] || COMPREPLY+=($(compgen -W "$_stretto_recipes" -- "$typed"))
            ;;
        run) _stretto_runs "$typed" ;;
        folder)
            compopt -o filenames
            mapfile -t COMPREPLY < <(compgen -d -- "$typed")
            ;;
        file)
            compopt -o filenames
            mapfile -t COMPREPLY < <(compgen -f -- "$typed")
            ;;
    esac
}

# Run folders, which end the word, and other folders, in which one may be.
_stretto_runs() {
    local folder has_other=
    while IFS= read -r folder; do
        if [[ -e $folder/journal.sqlite ]]; then
            COMPREPLY+=("$folder")
        elif [[ -n $(compgen -d -- "$folder/") ]]; then
            COMPREPLY+=("$folder/")
            has_other=1
        fi
    done < <(compgen -d -- "$1")
    [[ -z $has_other ]] || compopt -o nospace
}

complete -F _stretto stretto
"""

_ZSH = r"""
_stretto() {
    local kind command=$words[2] before=$words[CURRENT-1] typed=$words[CURRENT]
    if ((CURRENT == 2)); then
        compadd -- ${=_stretto_commands} --help --version
        return
    fi
    kind=${_stretto_kinds[$command $before]:-none}
    if [[ $kind == none ]]; then
        if [[ $typed == -* ]]; then
            compadd -- ${=_stretto_options[$command]}
            return
        fi
        kind=${_stretto_kinds[$command]:-nothing}
    fi
    case $kind in
        words:*) compadd -- ${=kind#words:} ;;
        key)
            if [[ $typed == *=* ]]; then
                compset -P '*='
                compadd -- ${=_stretto_values[${typed%%=*}]}
            else
                compadd -S '' -- ${=_stretto_keys}
            fi
            ;;
        recipe)
            _files -g '*.toml'
            compadd -- ${=_stretto_recipes}
            ;;
        run | folder) _files -/ ;;
        file) _files ;;
    esac
}

compdef _stretto stretto
"""
