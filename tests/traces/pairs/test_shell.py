"""Which shell commands are the same: those that differ in spelling alone. Every rule has its counter-examples."""

import random
import re
import shlex
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.traces.pairs.shell import normal_shell
from composer_prime.traces.states import canonical

FOLDER = "/home/a/p"

SAME = [
    ("grep  -n 'foo' \"src\" ", "grep -n foo src"),
    ("echo a\\ b", "echo 'a b'"),
    ('rg "\\.from\\(\\"a\\""', "rg '\\.from\\(\"a\"'"),
    ('grep "x$" f', "grep 'x$' f"),
    ('make "CC=x"', "make CC=x"),
    ("rm \\*", "rm '*'"),
    ("ls \\\n  -l", "ls -l"),
    ("a&&b", "a && b"),
    ("a;b;", "a\nb"),
    ("a &&\n b", "a && b"),
    ("if x; then\n y\nfi", "if x\nthen y; fi"),
    ("ls # all", "ls"),
    ("ls -la", "ls -a -l"),
    ("rg x -n src -n", "rg -n x src"),
    ("rg x -g'*.ts'", "rg -g '*.ts' x"),
    ("cat f | head -20", "cat f | head -n 20"),
    ("cat ./src//a.py", "cat src/a.py"),
    ("ls src/", "ls ./src"),
    ("grep -rn 'a b' /home/a/p/src", "grep -nr 'a b' src/"),
    ("cat /home/a/p/a.py > /home/a/p/b.py", "cat a.py >./b.py"),
    ("cd /home/a/p/sub && make", "cd sub && make"),
    ("cd /home/a/p && make", "make"),
    ('cd "/home/a/p/"; make', "make"),
    ("cd /home/a/p && cat <<E\n$(x)\nE", "cat <<E\n$(x)\nE"),
    ("bash -lc 'ls -la'", "ls -al"),
    ("ls 2>/dev/null -l", "ls -l 2>/dev/null"),
    ("cat > f <<'E'\n  x\nE\nls", 'cat >f << "EOF"\n  x\nEOF\nls'),
    ("cat <<E\nx\nE", "cat <<'E'\nx\nE"),
]

OTHER = [
    # blanks and quotes
    ("echo 'a  b'", "echo 'a b'"),
    ("echo ''", "echo"),
    ("echo '$HOME'", "echo $HOME"),
    ("echo '$HOME'", 'echo "$HOME"'),
    ('echo "$a"b', 'echo "$ab"'),
    ("rm '*'", "rm *"),
    ("echo {a,b}", "echo '{a,b}'"),
    ('echo {a","b}', "echo {a,b}"),
    ("cat '~/x'", "cat ~/x"),
    ('grep "a|b" f', "grep a|b f"),
    ("'CI=1' npm t", "CI=1 npm t"),
    ('echo "$(grep "a  b" f)"', 'echo "$(grep "a b" f)"'),
    ("echo `ls  -a`", "echo `ls -a`"),
    ("it's", "its"),
    # operators, redirections, comments
    ("a && b", "a; b"),
    ("a & b", "a && b"),
    ("a\nb", "a b"),
    ("(cd a && b)", "cd a && b"),
    ("echo 2 >f", "echo 2>f"),
    ("x >f 2>&1", "x 2>&1 >f"),
    ("x >./1", "x >&1"),
    ("[[ a < b ]]", "[[ a ]] < b"),
    ("echo do", "echo if"),
    ("echo if\nls", "echo if ls"),
    ("A=\nls", "A= ls"),
    ("exec {fd}>f", "exec {fd} >f"),
    ("echo a#b", "echo a"),
    ("ls # a\nrm x", "ls # a rm x"),
    # flags
    ("ls -F", "ls -f"),
    ("tar -xzf a", "tar -xfz a"),
    ("rm -if a", "rm -fi a"),
    ("gcc -lm a", "gcc -ml a"),
    ("rg -g a -g '!b' x", "rg -g '!b' -g a x"),
    ("ls -a -- -l", "ls -a -l"),
    ("head -5 f", "head -c 5 f"),
    ("ls a b", "ls b a"),
    ("make CC=x", "CC=x make"),
    # paths
    ("cp -r a/ b", "cp -r a b"),
    ("ls /", "ls ."),
    ("ls ''", "ls ."),
    ("./run.sh", "run.sh"),
    ("cat ./-x", "cat -x"),
    ("rm ./*", "rm *"),
    ("cat ./$X", "cat $X"),
    ("cat a/../b", "cat b"),
    ("grep ./x f", "grep x f"),
    ("grep -e ./x f", "grep -e x f"),
    ("grep /home/a/p/x f", "grep x f"),
    ("rm -rf /home/a/p", "rm -rf ."),
    ("echo /home/a/p/x", "echo x"),
    ("ln -s /home/a/p/x y", "ln -s x y"),
    ("find /home/a/p -path './x'", "find . -path './x'"),
    ("cd sub && cat /home/a/p/f", "cd sub && cat f"),
    ("for d in a b; do cat /home/a/p/f; cd $d; done", "for d in a b; do cat f; cd $d; done"),
    # the folder and shells in shells
    ("cd /home/a/p2 && ls", "ls"),
    ("cd /home/a/p || ls", "ls"),
    ("cd /home/a/p & ls", "ls"),
    ("bash -lc 'cd sub'", "cd sub"),
    ("bash -lc 'export A=1'", "export A=1"),
    ("bash -lc 'echo $x'", "echo $x"),
    ('bash -lc "echo $x"', "echo $x"),
    ("sh -c ls", "ls"),
    # here-documents
    ("cat <<'E'\n  x\nE", "cat <<'E'\nx\nE"),
    ("cat <<'E'\nx\nE", "cat <<'E'\nx\n\nE"),
    ("cat <<'E'\n$x\nE", "cat <<E\n$x\nE"),
    ("cat <<-E\n\tx\nE", "cat <<E\n\tx\nE"),
    ("cat <<E | sh\nx\nE", "cat | sh <<E\nx\nE"),
    ("cat 0<<E\nx\nE", "cat 0 <<E\nx\nE"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_commands_that_differ_in_spelling_have_one_form(one: str, other: str) -> None:
    assert normal_shell(one, FOLDER) == normal_shell(other, FOLDER)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_commands_that_do_other_things_stay_apart(one: str, other: str) -> None:
    assert normal_shell(one, FOLDER) != normal_shell(other, FOLDER)


def test_words_that_no_shell_reads_are_those_of_a_command_whose_characters_are_all_quoted() -> None:
    assert normal_shell(["git", "log", "-8"]) == normal_shell(["bash", "-lc", "git  log -8"])
    assert normal_shell(["rm", "*"]) == normal_shell(["bash", "-lc", "rm '*'"])
    assert normal_shell(["rm", "*"]) != normal_shell(["bash", "-lc", "rm *"])
    assert normal_shell(["cd", "a"]) != normal_shell(["bash", "-lc", "cd a"])  # there is no such program
    assert normal_shell(["A=1", "x"]) != normal_shell(["bash", "-lc", "A=1 x"])
    assert normal_shell(["zsh", "-lc", "ls"]) != normal_shell(["bash", "-lc", "ls"])
    assert normal_shell(["zsh", "-lc", "ls  -al"]) == normal_shell(["zsh", "-lc", "ls -la"])
    assert normal_shell([]) != normal_shell([""])


def quoted(word: str, how: int) -> str:
    return (f"'{word}'", f'"{word}"', "".join(f"\\{one}" for one in word))[how]


words = st.text("ab-.*?{}~#= ;&|<>()[]!", min_size=1, max_size=6)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(words, min_size=1, max_size=4), st.lists(words, min_size=1, max_size=4), st.data())
def test_quoted_words_have_the_form_of_what_the_shell_makes_of_them(one: list[str], other: list[str], data) -> None:
    def command(these: list[str]) -> str:
        return " ".join(["x", *(quoted(word, data.draw(st.integers(0, 2))) for word in these)])

    assert (normal_shell(command(one)) == normal_shell(command(other))) == (one == other)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("ab \n'\"\\$`;&|<>(){}[]#=-/~*\t", max_size=30))
def test_any_text_has_a_form_and_adding_to_it_makes_another(text: str) -> None:
    assert normal_shell(text, FOLDER) == normal_shell(text, FOLDER)
    assert normal_shell(f"x {text}", FOLDER) != normal_shell(f"y {text}", FOLDER)


ATOMS = [
    "a",
    "b",
    " ",
    "'",
    '"',
    "\\",
    "$a",
    "$",
    "*",
    "?",
    "{a,b}",
    "#",
    "~",
    "=",
    ";",
    "&&",
    "||",
    "\n",
    "(",
    ")",
    "<",
]
ATOMS += [">", "2", ">&1", "a=1", "{", "}", "!", "|", "if", "then", "fi", "do", "[", "]", "<<E", "E", "-"]
BASES = ["p", "p a", 'p "a b"', "a=1 p $a", "p a; p b", "if true; then p a; fi", "{ p a; }", "(p a)", "p a | cat"]
BASES += [
    "p <<E\na\nE",
    "p <<'E'\n$a\nE",
    "for x in a b; do p $x; done",
    "p a # b",
    "p a >f; cat f",
    "p [ab]",
    "p \\\n a",
]


def mutated(rng: random.Random) -> str:
    command = rng.choice(BASES)
    for _ in range(rng.randint(0, 3)):
        at = rng.randint(0, len(command))
        added = rng.choice(ATOMS) if rng.random() < 0.7 else rng.choice([" ", "  ", "\n", ""])
        command = command[:at] + added + command[at if rng.random() < 0.8 else at + 1 :]
    return command


def test_commands_of_one_form_do_the_same_in_bash(tmp_path: Path) -> None:
    rng, forms = random.Random(7), defaultdict(set)
    for _ in range(6000):
        command = mutated(rng)
        if re.search(r"(?<![&>])&(?!&)", command):  # two at once print in any order
            continue
        forms[canonical(normal_shell(command))].add(command)
    several = [command for those in forms.values() if len(those) > 1 for command in sorted(those)]
    script = "p() { printf '<%s>' \"$@\"; cat; }; a='x  y'; touch a b ab\n"
    script += "".join(f"rm -f f; (eval {shlex.quote(one)}) 2>&- </dev/null; printf '=%s\\0' $?\n" for one in several)
    (tmp_path / "all.sh").write_text(script)
    done = subprocess.run(["bash", "all.sh"], cwd=tmp_path, capture_output=True, text=True, check=True)
    did = dict(zip(several, done.stdout.split("\0"), strict=False))
    bad = {one for one in several if did[one].endswith("=2")}  # no command of bash at all
    for those in forms.values():
        assert len({did[one] for one in those - bad} if len(those) > 1 else ()) <= 1, those
    assert len(several) - len(bad) > 300
