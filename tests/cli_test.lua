-- cli_test - options of scripts: types, messages, help, exit codes.
local check <const> = require "tests.check"
local rille <const> = require "rille"
local cli <const> = require "rille.cli"

local function spec()
  return {
    help = "Trains a GPT.",
    "Model",
    { "layers", 6, "blocks", min = 1, max = 96 },
    { "style", "gpt2", "kind of blocks", choices = { "gpt2", "llama" } },
    { "kv-heads", 0, "key heads" },
    "Training",
    { "lr", 1e-3, "learning rate" },
    { "out", nil, "directory", type = "string" },
    { "recompute", false, "compute again" },
    { "shuffle", true, "in a new order" },
  }
end

local function parse(...) return cli.parse(spec(), { [0] = "train.lua", ... }) end

local function refused(words, ...)
  local values, message, help = parse(...)
  check.ok(not values and message and not help, "nothing was refused")
  if not message:find(words, 1, true) then
    error(("the message is %q, expected %q"):format(message, words), 2)
  end
  check.ok(message:find("^train%.lua: ") and message:find("hint: rille train.lua --help", 1, true))
end

check.test("defaults hold where nothing is given, with their types", function()
  local o = parse()
  check.equal({ o.layers, o.style, o.kv_heads, o.lr, o.recompute, o.shuffle },
    { 6, "gpt2", 0, 1e-3, false, true })
  check.equal(o.out, nil)
  check.equal({ math.type(o.layers), math.type(o.lr) }, { "integer", "float" })
end)

check.test("--key value, --key=value, switches, the last of two counts", function()
  local o = parse("--layers", "12", "--style=llama", "--lr", "3e-4", "--recompute", "--no-shuffle",
    "--out", "runs/a=b", "--layers=8")
  check.equal({ o.layers, o.style, o.lr, o.recompute, o.shuffle, o.out },
    { 8, "llama", 3e-4, true, false, "runs/a=b" })
  check.equal(parse("--recompute", "true", "--shuffle=off").shuffle, false)
  check.equal(parse("--recompute", "--lr", "2").lr, 2.0)
  check.equal(math.type(parse("--lr", "2").lr), "float")
  check.equal(parse("--layers", "1e1").layers, 10)
  check.equal(parse("--out=").out, "")
  check.equal(parse("--kv-heads", "-1").kv_heads, -1)
end)

check.test("- and _ are the same in names", function()
  check.equal(parse("--kv_heads", "2").kv_heads, 2)
  check.equal(parse("--kv-heads=3")["kv-heads"], 3)
  check.equal(cli.parse({ { "a_b", 1, "" } }, { "--a-b", "4" }).a_b, 4)
end)

check.test("an unknown option is refused with the nearest name", function()
  refused('there is no option --layer; did you mean "--layers"?', "--layer", "6")
  refused('there is no option --kv-head; did you mean "--kv-heads"?', "--kv-head=2")
  refused('there is no option --no-recompte; did you mean "--no-recompute"?', "--no-recompte")
  refused('there is no option --zzzzzzz\n', "--zzzzzzz")
  refused('there is no option --v\n', "--v", "2")
  refused('"6" stands where an option is expected', "6")
  refused('"-l" stands where an option is expected', "-l")
  refused('"--" stands where an option is expected', "--")
end)

check.test("a wrong value names the option, the value and what is valid", function()
  refused('--layers is "six": it must be an integer from 1 to 96', "--layers", "six")
  refused('--layers is "1.5": it must be an integer', "--layers=1.5")
  refused('--layers is "0": it must be an integer from 1 to 96', "--layers=0")
  refused('--layers is "97"', "--layers=97")
  refused('--lr is "fast": it must be a number', "--lr", "fast")
  refused('--lr is "nan"', "--lr", "nan")
  refused('--lr is "1e999"', "--lr", "1e999")
  refused('--style is "lama": it must be one of gpt2, llama; did you mean "llama"?', "--style=lama")
  refused('--shuffle is "maybe": it must be true or false', "--shuffle=maybe")
  refused('--layers has no value: it must be an integer from 1 to 96, as in --layers 6', "--layers")
  refused('--out has no value: it must be a text, as in --out TEXT', "--out", "--lr", "1")
  refused('--no-shuffle takes no value', "--no-shuffle=yes")
  refused('--layers is no switch, so there is no --no-layers', "--no-layers")
end)

check.test("help comes from the same table, aligned, with defaults", function()
  local values, message, help = parse("--help")
  check.equal({ values, message }, {})
  check.equal(help, [[
Trains a GPT.

usage: rille train.lua [--option value]...

Model
  --layers N          blocks, from 1 to 96 (6)
  --style gpt2|llama  kind of blocks (gpt2)
  --kv-heads N        key heads (0)

Training
  --lr X              learning rate (0.001)
  --out TEXT          directory
  --recompute         compute again (off)
  --[no-]shuffle      in a new order (on)
  --help              this text
]])
  check.ok(select(3, parse("--layers", "3", "-h")))
end)

check.test("the table of options is strict", function()
  local o = parse()
  check.raises(function() return o.layres end, "cli_test.lua:%d+: ",
    'the script has no option "layres"; did you mean "layers"?')
end)

check.test("mistakes in a declaration are the script's errors", function()
  check.raises(function() cli.parse({ { "text", nil, "a file" } }, {}) end, "%-%-text has no type",
    "cli_test.lua")
  check.raises(function() cli.parse({ { "a", 1, "" }, { "a", 2, "" } }, {}) end, "declared twice")
  check.raises(function() cli.parse({ { "a", 1, "", chioces = { 1 } } }, {}) end,
    'unknown key "chioces"; did you mean "choices"')
  check.raises(function() cli.parse({ { 6, "layers" } }, {}) end, "begins with the option's name")
end)

check.test("an option may need another one", function()
  local rows = { { "out", nil, "directory", type = "string" },
    { "save-every", 0, "steps between checkpoints", needs = "out" } }
  local function message(...) return select(2, cli.parse(rows, { [0] = "train.lua", ... })) end
  check.ok(message("--save-every", "5"):find("--save-every 5 does nothing without --out", 1, true))
  check.equal(message("--save-every", "5", "--out", "a"), nil)
  check.equal(message("--save-every", "0"), nil)
  check.ok(select(3, cli.parse(rows, { "--help" })):find("checkpoints, needs --out (0)", 1, true))
  check.raises(function() cli.parse({ { "a", 1, "", needs = "b" } }, {}) end,
    "%-%-a needs %-%-b, which is not declared")
end)

check.test("did_you_mean: near names only", function()
  check.equal(rille.did_you_mean("weight_decya", { "lr", "weight_decay" }),
    '; did you mean "weight_decay"?')
  check.equal(rille.did_you_mean("momentum", { "lr", "weight_decay" }), "")
  check.equal(rille.did_you_mean("t", { "lr", "T" }), '; did you mean "T"?')
  check.equal(rille.did_you_mean("q", { "T" }), "")
  check.equal(rille.did_you_mean("x", {}), "")
end)

-- Runs a script with the program itself: exit code, what it wrote to stdout and to stderr.
local function run(arguments)
  local script, out, err = os.tmpname(), os.tmpname(), os.tmpname()
  local f = assert(io.open(script, "w"))
  f:write('local o = require("rille").options{ help = "H.", {"layers", 6, "blocks"} }\n',
    'print("layers", o.layers)\n')
  f:close()
  local program = (os.getenv "BUILD" or "build/release") .. "/rille"
  local _, _, code = os.execute(("%s %s %s >%s 2>%s"):format(program, script, arguments, out, err))
  local texts = {}
  for i, path in ipairs { out, err } do
    local file = assert(io.open(path))
    texts[i] = file:read("a")
    file:close()
  end
  for _, path in ipairs { script, out, err } do os.remove(path) end
  return code, texts[1], texts[2]
end

check.test("exit codes: 0 with help on stdout, 2 with a message on stderr", function()
  check.equal({ run "--layers 7" }, { 0, "layers\t7\n", "" })
  local code, out, err = run "--help"
  check.equal({ code, err }, { 0, "" })
  check.ok(out:find("--layers N", 1, true) and not out:find("layers\t"))
  code, out, err = run "--layer 7"
  check.equal({ code, out }, { 2, "" })
  check.ok(err:find('^rille: .*there is no option %-%-layer; did you mean "%-%-layers"'), err)
end)

check.done()
