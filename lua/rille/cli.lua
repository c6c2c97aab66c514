-- cli - options of a script, declared once: parsing, --help and messages come from one table.
--
--     local o = rille.options {
--       help = "Trains a GPT.",
--       { "layers", 6, "number of blocks", min = 1 },
--       { "style", "gpt2", "kind of blocks", choices = { "gpt2", "llama" } },
--       { "text", nil, "a text file", type = "string" },
--       { "recompute", false, "keep less, compute more" },
--       parallel = true,     -- adds --dp, --pp, --pp-schedule, ...: o.parallel is for the Trainer
--     }
--
-- On the command line --layers 8, --layers=8, --recompute, --no-recompute. In names - and _ are the
-- same: { "kv-heads", 2 } is --kv-heads or --kv_heads, and o.kv_heads. Of an option given twice the
-- last one counts.
local rille = require "rille"
local core = rille.core
local expect = require "rille.expect"
local fail = require "rille.fail"
local is_finite = require "rille.is_finite"
local record = require "rille.record"

local cli = {}

local EXIT_USAGE = 2
local HELP_COLUMN = 32 -- where help texts begin at most

--- `; did you mean "lr"?`, or an empty text if no name of the list is near.
---@param name string
---@param list string[]
---@return string
function cli.did_you_mean(name, list)
  expect("rille.did_you_mean", "name", name, "string")
  expect("rille.did_you_mean", "list", list, "list")
  local near = core.nearest(name, list)
  local is_letter = #name:gsub("^%-+", "") == 1 -- any other letter would be near
  if not near or is_letter and near:lower() ~= name:lower() then return "" end
  return ("; did you mean %q?"):format(near)
end

-- ---- types: what a text means, and what the messages and the help call it

local switches = {
  ["true"] = true, yes = true, on = true, ["1"] = true,
  ["false"] = false, no = false, off = false, ["0"] = false,
}

local types = {
  integer = { words = "an integer", sign = "N",
    read = function(text) return math.tointeger(tonumber(text)) end },
  number = { words = "a number", sign = "X",
    read = function(text)
      local value = tonumber(text)
      if value and is_finite(value) then return value + 0.0 end
    end },
  boolean = { words = "true or false", sign = "true|false",
    read = function(text) return switches[text] end },
  string = { words = "a text", sign = "TEXT", read = function(text) return text end },
}

local function type_of(value)
  return math.type(value) == "integer" and "integer" or type(value) == "number" and "number"
    or type(value)
end

-- ---- what the script declares

local row_keys = {
  type = true, choices = true, min = true, max = true, sign = true, needs = true,
}

local function check_row(row)
  if type(row[1]) ~= "string" or not row[1]:find("^%a[%w_-]*$") then
    fail("options: a row begins with the option's name, as in {\"layers\", 6, \"blocks\"}; got %s",
      tostring(row[1]))
  end
  for key in pairs(row) do
    if type(key) == "string" and not row_keys[key] then
      fail("options: --%s has the unknown key %q%s", row[1], key,
        cli.did_you_mean(key, { "type", "choices", "min", "max", "needs", "sign" }))
    end
  end
end

-- {name, default, help, ...} -> a declaration.
local function declare(row)
  check_row(row)
  local default = row[2]
  local kind = row.type or default ~= nil and type_of(default)
    or row.choices and type_of(row.choices[1])
  if not types[kind] then
    fail("options: --%s has no type: give it a default, or type = \"integer\", \"number\", "
      .. "\"boolean\" or \"string\"", row[1])
  end
  if kind == "number" and default then default = default + 0.0 end
  return {
    name = row[1]:gsub("_", "-"), key = row[1]:gsub("-", "_"), default = default,
    help = row[3] or "", type = kind, choices = row.choices, min = row.min, max = row.max,
    sign = row.sign, needs = row.needs,
  }
end

-- ---- the layout over ranks, which every training script may take: { parallel = true }

local parallel_rows = {
  "Layout over ranks:",
  { "dp", 0, "replicas (0: as many as the world has room for)", min = 0 },
  { "tp", 1, "ranks that share a layer", min = 1 },
  { "sequence-parallel", false, "tp ranks share time out between the layers that they share" },
  { "pp", 1, "ranks that the model's layers are spread over", min = 1 },
  { "pp-schedule", nil, "pipeline schedule: rille schedule --list, or a file x.lua, x.csv "
    .. "(1f1b; interleaved with several stages a rank)", type = "string", sign = "NAME" },
  { "stages-per-rank", nil, "parts of the model on each rank (the schedule's own number)",
    type = "integer", min = 1 },
  { "group", nil, "microbatches a group, of interleaved", type = "integer", min = 1 },
  { "split", nil, "units a stage: uniform, parameters, time, or a list such as 3,2,2,1",
    type = "string" },
  { "stall-timeout", core.stall_timeout(),
    "seconds without a sign of life after which a rank is given up", min = 0.1 },
}

-- What Trainer's option `parallel` wants, from these rows' values.
local function parallel_of(values)
  return {
    dp = values.dp > 0 and values.dp or nil, tp = values.tp, pp = values.pp,
    sequence_parallel = values.sequence_parallel or nil, pipeline = values.pp_schedule,
    stages_per_rank = values.stages_per_rank, group = values.group,
    split = values.split and record.split_of(values.split), stall_timeout = values.stall_timeout,
  }
end

-- The declarations in order (headings are texts), and by key.
local function declare_all(spec)
  expect("rille.options", "the argument", spec, "table")
  local list, by_key = {}, {}
  local rows = table.move(spec, 1, #spec, 1, {})
  if spec.parallel then table.move(parallel_rows, 1, #parallel_rows, #rows + 1, rows) end
  for _, row in ipairs(rows) do
    local entry = row
    expect("rille.options", "a row", row, "table|string")
    if type(row) == "table" then
      entry = declare(row)
      if by_key[entry.key] or entry.key == "help" then
        fail("options: --%s is declared twice%s", entry.name,
          entry.key == "help" and " (--help is always there)" or "")
      end
      by_key[entry.key] = entry
    end
    table.insert(list, entry)
  end
  for _, option in pairs(by_key) do
    if option.needs and not by_key[option.needs:gsub("-", "_")] then
      fail("options: --%s needs --%s, which is not declared", option.name, option.needs)
    end
  end
  return list, by_key
end

-- ---- help

local function show(value)
  if type(value) == "boolean" then return value and "on" or "off" end
  return math.type(value) == "float" and ("%.14g"):format(value) or tostring(value)
end

local function left_side(option)
  if option.type == "boolean" then
    return ("  --%s%s"):format(option.default and "[no-]" or "", option.name)
  end
  local sign = option.sign or types[option.type].sign
  if option.choices and not option.sign then sign = table.concat(option.choices, "|") end
  return ("  --%s %s"):format(option.name, sign)
end

local function right_side(option)
  local range = {}
  if option.min then table.insert(range, "from " .. show(option.min)) end
  if option.max then table.insert(range, "to " .. show(option.max)) end
  local words = option.help
  if #range > 0 then words = words .. ", " .. table.concat(range, " ") end
  if option.needs then words = words .. ", needs --" .. option.needs end
  if option.default == nil then return words end
  return ("%s (%s)"):format(words, show(option.default))
end

local function help_text(spec, list, script)
  local width = 0
  for _, option in ipairs(list) do
    if type(option) == "table" then
      local n = #left_side(option) + 2
      if n <= HELP_COLUMN and n > width then width = n end
    end
  end
  local lines = {}
  if spec.help then table.insert(lines, spec.help .. "\n") end
  table.insert(lines, ("usage: rille %s [--option value]..."):format(script))
  if type(list[1]) ~= "string" then table.insert(lines, "") end
  for _, option in ipairs(list) do
    if type(option) == "string" then
      table.insert(lines, "\n" .. option)
    else
      local left = left_side(option)
      if #left + 2 > width then left = left .. "\n" .. (" "):rep(width)
      else left = left .. (" "):rep(width - #left) end
      table.insert(lines, left .. right_side(option))
    end
  end
  table.insert(lines, "  --help" .. (" "):rep(math.max(width - 8, 2)) .. "this text")
  return table.concat(lines, "\n") .. "\n"
end

-- ---- parsing

local Refusal = {} -- what refuse() raises: words for the user of the script
Refusal.__index = Refusal

local function refuse(words, ...) error(setmetatable({ words = words:format(...) }, Refusal)) end

local function no_such_option(word, list)
  local names = { "--help" }
  for _, option in ipairs(list) do
    if type(option) == "table" then
      table.insert(names, "--" .. option.name)
      if option.type == "boolean" then table.insert(names, "--no-" .. option.name) end
    end
  end
  refuse("there is no option %s%s", word, cli.did_you_mean(word, names))
end

local function valid_words(option)
  if option.choices then
    local names = {}
    for i, choice in ipairs(option.choices) do names[i] = show(choice) end
    return "one of " .. table.concat(names, ", ")
  end
  local words = types[option.type].words
  if option.min then words = words .. " from " .. show(option.min) end
  if option.max then words = words .. (option.min and " to " or " up to ") .. show(option.max) end
  return words
end

local function read_value(option, text)
  local value = types[option.type].read(text)
  local good = value ~= nil
  if good and option.choices then
    good = false
    for _, choice in ipairs(option.choices) do good = good or choice == value end
  end
  if good and option.min and value < option.min then good = false end
  if good and option.max and value > option.max then good = false end
  if good then return value end
  local near = option.choices and option.type == "string"
    and cli.did_you_mean(text, option.choices) or ""
  refuse("--%s is %q: it must be %s%s", option.name, text, valid_words(option), near)
end

-- An option word -> its declaration, the value behind =, and whether it begins with --no-.
local function look_up(word, list, by_key)
  local name, equals, value = word:match("^%-%-([^=]+)(=?)(.*)$")
  local key = name and name:gsub("-", "_")
  local option = key and by_key[key]
  local negated = not option and key and by_key[key:match("^no_(.+)$")]
  if negated and negated.type ~= "boolean" then
    refuse("--%s is no switch, so there is no %s: it must be %s", negated.name, word,
      valid_words(negated))
  end
  if not option and not negated then no_such_option(word:match("^[^=]*"), list) end
  return option or negated, equals == "=" and value or nil, not option
end

-- Reads the option at args[i] into values; the index after it.
local function parse_option(values, args, i, list, by_key)
  local option, text, negated = look_up(args[i], list, by_key)
  if negated then
    if text then refuse("%s takes no value", args[i]:match("^[^=]*")) end
    values[option.key] = false
    return i + 1
  end
  if text then
    values[option.key] = read_value(option, text)
    return i + 1
  end
  local following = args[i + 1]
  if option.type == "boolean" then
    local given = following and switches[following]
    values[option.key] = given == nil or given
    return given == nil and i + 1 or i + 2
  end
  if not following or following:find("^%-%-") then
    refuse("--%s has no value: it must be %s, as in --%s %s", option.name, valid_words(option),
      option.name, option.default ~= nil and show(option.default) or types[option.type].sign)
  end
  values[option.key] = read_value(option, following)
  return i + 2
end

-- An option that was set does nothing without the one that it needs.
local function check_needs(values, by_key, list)
  for _, option in ipairs(list) do
    local other = type(option) == "table" and option.needs and by_key[option.needs:gsub("-", "_")]
    if other and values[option.key] ~= option.default and values[other.key] == other.default then
      refuse("--%s %s does nothing without --%s", option.name, show(values[option.key]), other.name)
    end
  end
end

local function parse_all(list, by_key, args)
  local values = {}
  for key, option in pairs(by_key) do values[key] = option.default end
  local i = 1
  while args[i] do
    if args[i] == "--help" or args[i] == "-h" then return values, true end
    if not args[i]:find("^%-%-.") then
      refuse("%q stands where an option is expected; options begin with --", args[i])
    end
    i = parse_option(values, args, i, list, by_key)
  end
  check_needs(values, by_key, list)
  return values, false
end

-- Reading o.layres is an error, also where the default is nil; o["kv-heads"] is o.kv_heads.
local function strict(values, by_key)
  local names = {}
  for key in pairs(by_key) do table.insert(names, key) end
  table.sort(names)
  return setmetatable(values, {
    __index = function(_, name)
      if type(name) ~= "string" then return nil end
      local key = name:gsub("-", "_")
      if by_key[key] then return rawget(values, key) end
      fail("the script has no option %q%s", name, cli.did_you_mean(name, names))
    end,
  })
end

--- Parses without ending the process: values; or nil and a message; or nil, nil and the help text.
---@param spec table as for rille.options
---@param args string[] the script at [0], its arguments from [1] on
function cli.parse(spec, args)
  local list, by_key = declare_all(spec)
  local script = args[0] or "script.lua"
  local passed, values, wants_help = pcall(parse_all, list, by_key, args)
  if not passed then
    if getmetatable(values) ~= Refusal then error(values, 0) end
    return nil, ("%s: %s\n    hint: rille %s --help lists the options"):format(script, values.words,
      script)
  end
  if wants_help then return nil, nil, help_text(spec, list, script) end
  if spec.parallel then values.parallel = parallel_of(values) end
  return strict(values, by_key)
end

--- The options of a script. On a wrong one: a message from rank 0 and exit code 2; on --help: the
--- help text and exit code 0.
---@param spec table rows {name, default, help, type =, choices =, min =, max =, sign =, needs =};
--- texts between them are headings; `help` is about the script
---@param args string[]? default: the script's arguments
---@return table options by name
function cli.options(spec, args)
  require "rille.schedule".refuse_in_script("has options of its own")
  local values, wrong, help = cli.parse(spec, args or rawget(_G, "arg") or {})
  if values then return values end
  if core.rank == 0 then
    if help then io.stdout:write(help) else io.stderr:write("rille: ", wrong, "\n") end
  end
  rille.exit(help and 0 or EXIT_USAGE)
end

return cli
