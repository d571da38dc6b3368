# Runs the installed package in the working directory, which is empty: neither the repository nor an extra is there.
python - <<'END'
import pathlib, stretto
folder = pathlib.Path(stretto.__file__)
assert "site-packages" in folder.parts, f"this is not the installed package: {folder}"
END
stretto --version
stretto doctor
stretto check quickstart > check.txt
stretto train quickstart --set training.steps=3 --set evaluation.prompts=16 --set evaluation.every=0 --out run
stretto verify run
stretto show run --update 2 --samples 1
stretto list .
stretto report run -o report.html
stretto trace run -o trace.json
stretto export run --merge -o model
python - <<'END'
import stretto
run = stretto.train("quickstart", {"training.steps": 2, "evaluation.prompts": 4, "evaluation.every": 0}, out="again", progress=False)
assert run.verify().hold
END
echo "the wheel works"
