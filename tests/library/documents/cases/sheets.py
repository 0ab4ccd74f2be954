"""Workbooks, as people made them whose spreadsheets were read wrong."""

import datetime
import zipfile

import openpyxl
from documents.cases import Case
from openpyxl.cell.rich_text import CellRichText, TextBlock
from openpyxl.cell.text import InlineFont
from openpyxl.styles import Font
from openpyxl.worksheet.table import Table


def book(**sheets):
    """Writes sheets by name: rows, or what fills one."""

    def write(path):
        made = openpyxl.Workbook()
        made.remove(made.active)
        for name, fill in sheets.items():
            sheet = made.create_sheet(name)
            if callable(fill):
                fill(sheet)
            else:
                rows(fill)(sheet)
        made.save(path)

    return write


def rows(lines, merged=(), hide=()):
    """Fills a sheet; ``merged`` are ranges, ``hide`` columns by letter and rows by number."""

    def fill(sheet):
        for line in lines:
            sheet.append(line)
        for place in merged:
            sheet.merge_cells(place)
        for place in hide:
            if isinstance(place, str):
                sheet.column_dimensions[place].hidden = True
            else:
                sheet.row_dimensions[place].hidden = True

    return fill


def formats(*shown):
    """A sheet of values and the formats that they are shown in."""

    def fill(sheet):
        sheet.append(["Item", "Shown"])
        for at, (value, code) in enumerate(shown, 2):
            sheet.append([f"Row {at}", value])
            sheet.cell(at, 2).number_format = code

    return fill


def emphasised(sheet):
    for line in (["Owner", "Home"], ["Ann", "Bergen"], ["Bob", "Lund"]):
        sheet.append(line)
    for it in sheet[1]:
        it.font = Font(bold=True)


def as_table(sheet):
    for line in (["Term", "Meaning"], ["fjord", "inlet"], ["tarn", "lake"]):
        sheet.append(line)
    sheet.add_table(Table(displayName="Words", ref="A1:B3"))


def raised(sheet):
    power = TextBlock(InlineFont(vertAlign="superscript"), "6")
    low = TextBlock(InlineFont(vertAlign="subscript"), "2")
    gone = TextBlock(InlineFont(strike=True), "40 euros")
    sheet.append([CellRichText("The tank holds 10", power, " litres")])
    sheet.append([CellRichText("CO", low, " and ", gone, " 30 euros")])


def empty_texts(path):
    """Formulas that gave an empty text, as LibreOffice saves them: computed."""
    book(Data=[["Name", "Note"], ["Ann", "x"], ["Bob", "y"], ["Cy", "z"]])(path)
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    name = "xl/worksheets/sheet1.xml"
    cell = b'<c r="B4" t="str"><f>IF(A4="","",B9)</f><v></v></c>'
    start = parts[name].index(b'<c r="B4"')
    end = parts[name].index(b"</c>", start) + 4
    parts[name] = parts[name][:start] + cell + parts[name][end:]
    with zipfile.ZipFile(path, "w") as new:
        for part, data in parts.items():
            new.writestr(part, data)


STAFF = [
    ["Department", "Name", "Phone"],
    ["Sales", "Ann", 11],
    [None, "Bob", 12],
    ["Law", "Dee", 14],
]
FORM = [["Client", "Acme"], ["Invoice no", 4711], ["Amount", 250], []]
FORM += [["Item", "Count", "Euro"], ["Paint", 1, 12], ["Brush", 2, 3], ["Total", None, 15]]
MAY = datetime.datetime(2024, 5, 1, 18, 5)

CASES = [
    Case("merged cells", "staff.xlsx", book(Staff=rows(STAFF, ["A2:A3"])),
         kept=("Department: Sales | Name: Ann | Phone: 11",
               "Department: Sales | Name: Bob | Phone: 12", "Department: Law | Name: Dee")),
    Case("merged cells", "quarters.xlsx",
         book(Q=rows([[None, "2023", None, "2024"], ["Product", "Q1", "Q2", "Q1", "Q2"],
                      ["Cable", 1, 2, 3, 4]], ["B1:C1", "D1:E1"])),
         kept=("Product: Cable | 2023 Q1: 1 | 2023 Q2: 2 | 2024 Q1: 3 | 2024 Q2: 4",)),
    Case("merged cells", "same-price.xlsx",
         book(P=rows([["Ticket", "Summer", "Winter"], ["Adult", 8, None], ["Child", 4, 2]],
                     ["B2:C2"])),
         kept=("Ticket: Adult | Summer: 8 | Winter: 8", "Ticket: Child | Summer: 4 | Winter: 2")),
    Case("merged cells", "headline.xlsx",
         book(P=rows([["Fares from May on"], ["Ticket", "Price", "Days"], ["Adult", 8, 1]],
                     ["A1:C1"])),
         kept=("Fares from May on", "Ticket: Adult | Price: 8 | Days: 1"),
         invented=("Fares from May on:",)),
    Case("several tables in a sheet", "overview.xlsx",
         book(Both=[["Employee", "Salary"], ["Ann", 5000], [], ["City", "Population"],
                    ["Bergen", 290000]]),
         kept=("Employee: Ann | Salary: 5000", "City: Bergen | Population: 290000"),
         invented=("Employee: Bergen", "Employee: City")),
    Case("several tables in a sheet", "invoice.xlsx", book(Invoice=FORM),
         kept=("Client", "Acme", "Invoice no", "4711", "Amount", "250",
               "Item: Paint | Count: 1 | Euro: 12", "Item: Total | Euro: 15"),
         invented=("Client: Invoice", "Acme: 4711", "Acme: 250", "Acme: 12", "Client: Paint")),
    Case("several tables in a sheet", "stacked.xlsx",
         book(S=[["Employee", "Salary"], ["Ann", 5000], ["Bob", 4000], ["City", "Population"],
                 ["Bergen", 290000], ["Lund", 95000]]),
         kept=("Ann", "5000", "City", "Population", "Bergen", "290000"),
         invented=("Employee: Bergen", "Salary: 290000", "Salary: Population")),
    Case("several tables in a sheet", "notes-below.xlsx",
         book(S=[["Item", "Euro"], ["Paint", 12], ["Brush", 3], ["Tape", 2],
                 ["Note", "Prices include tax"]]),
         kept=("Item: Paint | Euro: 12", "Note", "Prices include tax"),
         invented=("Euro: Prices", "Item: Note")),
    Case("several tables in a sheet", "beside.xlsx",
         book(S=[["Name", "Age", None, "Stock", "Price"], ["Ann", 31, None, "Desk", 90],
                 ["Bob", 42, None, "Chair", 40]]),
         kept=("Name: Ann | Age: 31", "Name: Bob | Age: 42", "Stock: Desk | Price: 90"),
         invented=("Age: 31 | Stock",)),
    Case("several tables in a sheet", "spacer.xlsx",
         book(S=[["Product", "Q1", None, "Q3", "Q4"], ["Cable", 1, None, 3, 4]]),
         kept=("Product: Cable | Q1: 1 | Q3: 3 | Q4: 4",)),
    Case("several tables in a sheet", "headlines.xlsx",
         book(S=[["Item", "Cost"], ["Paint", 12], ["Brush", 3], ["People"], ["Name", "Role"],
                 ["Ann", "Chef"], ["Bob", "Cook"]]),
         kept=("Item: Brush | Cost: 3", "People", "Name: Ann | Role: Chef"),
         invented=("Item: Ann", "Item: Name", "Cost: Chef")),
    Case("several tables in a sheet", "figures-below.xlsx",
         book(S=[["Employee", "Salary"], ["Ann", 5000], ["Bob", 4000], [], ["Headcount", 2],
                 ["Average age", 41]]),
         kept=("Employee: Bob | Salary: 4000", "Headcount", "2", "Average age", "41"),
         invented=("Employee: Headcount", "Salary: 41")),
    Case("several tables in a sheet", "gaps.xlsx",
         book(S=[["Region", "Units", "Share"], ["North", 5, 0.2], [], ["South", 7, 0.3], [],
                 ["Total", 12, 0.5]]),
         kept=("Region: South | Units: 7", "Region: Total | Units: 12 | Share: 0.5")),
    Case("names of columns", "units.xlsx",
         book(S=[["Length", "Mass"], ["m", "kg"], [1, 2], [3, 4]]),
         kept=("Length m: 3 | Mass kg: 4",), invented=("m | kg",)),
    Case("names of columns", "founded.xlsx",
         book(S=[["Founded", 1990], ["Employees", 12], ["Offices", 3]]),
         kept=("Founded | 1990", "Employees | 12"), invented=("1990: ", "Founded: ")),
    Case("names of columns", "four-columns-form.xlsx",
         book(S=[["Client", "Acme", "Agent", "Kim"], ["Date", "2024-05-01", "Number", 47]]),
         kept=("Client | Acme | Agent | Kim", "Date | 2024-05-01 | Number | 47"),
         invented=("Client: ", "Acme: ", "Kim: ")),
    Case("names of columns", "bold.xlsx", book(S=emphasised), kept=("Owner: Ann | Home: Bergen",)),
    Case("names of columns", "words.xlsx", book(S=as_table), kept=("Term: tarn | Meaning: lake",)),
    Case("names of columns", "years.xlsx",
         book(S=[["Product", 2023, 2024], ["Cable", 1, 2], ["Hub", 3, 4]]),
         kept=("Product: Hub | 2023: 3 | 2024: 4",)),
    Case("names of columns", "none.xlsx",
         book(S=[["Ann", 31, "Bergen"], ["Bob", 42, "Lund"], ["Cy", 23, "Oslo"]]),
         kept=("Ann | 31 | Bergen", "Bob | 42 | Lund"), invented=("Ann: ", "31: ", "Bergen: ")),
    Case("number formats", "formats.xlsx",
         book(S=formats((1234, "00000"), (12.5, '0.0"%"'), (12.5, "0.0\\%"), (0.125, "0.0%"),
                        (1234.5, "#,##0.00 [$€-407]"), (99, '"$"#,##0.00'), (5, '0 "kg"'),
                        (1, '"Yes";;"No"'), (-5, "[Red]0%;[Blue]-0"), (5551234, "000-0000"))),
         kept=("01234", "12.5%", "12.5%", "12.5%", "1,234.50 €", "$99.00", "5 kg", "Shown: Yes",
               "Shown: -5", "555-1234"),
         invented=("1250", "-500%", "Shown: 1234 ")),
    Case("number formats", "moments.xlsx",
         book(S=formats((MAY, "mmmm yyyy"), (MAY, "dd/mm/yyyy"), (MAY, "h:mm AM/PM"),
                        (datetime.timedelta(hours=30, minutes=15), "[h]:mm"),
                        (MAY, "d. mmm yy, hh:mm"))),
         kept=("May 2024", "01/05/2024", "6:05 PM", "30:15", "1. May 24, 18:05"),
         invented=("45413", "1 day")),
    Case("number formats", "ledger.xlsx",
         book(S=formats((-1234.5, "#,##0.00_);(#,##0.00)"), (2500000, '0.0,,"M"'), (0.5, "# ?/?"),
                        (1.5, "# ?/?"), (123456, "0.00E+00"), (0, '0;-0;"none"'),
                        (1500, '[>=1000]0.0,"k";0'), (-0.5, "0.0%;[Red]-0.0%"), (8, "0.0 %"))),
         kept=("(1,234.50)", "2.5M", "1/2", "1 1/2", "1.23E+05", "Shown: none", "1.5k", "-50.0%",
               "800.0 %"),
         invented=("-1234.5", "2500000", "Shown: 0")),
    Case("number formats", "unseen.xlsx", book(S=formats((7, ";;;"), (8, "0"))),
         kept=("Row 2", "Shown: 8"), invented=("7",), said=("hidden by the format (B2)",)),
    Case("formulas without a value", "budget.xlsx",
         book(Costs=[["Item", "Cost"], ["Paint", 12], ["Brush", 3], ["Total", "=SUM(B2:B3)"]]),
         kept=("Item: Paint | Cost: 12", "Total"), invented=("SUM",),
         said=("without a value (B4)",)),
    Case("formulas without a value", "hidden-formulas.xlsx",
         book(Costs=[["Item", "Cost"], ["Paint", 12], ["Total", "=B2"]],
              More=[["Item", "Cost"], ["Glue", 5], ["Total", "=B2*2"]]),
         kept=("Cost: 12", "Cost: 5"), said=("2 formulas without a value (Costs!B3, More!B3)",)),
    Case("formulas without a value", "empty-texts.xlsx", empty_texts,
         kept=("Name | Note", "Ann", "Bob", "Cy"), invented=("IF(",)),
    Case("hidden rows and columns", "margin.xlsx",
         book(S=rows([["Item", "Cost", "Margin secret"], ["Paint", 12, "80%"], ["Brush", 3, "10%"]],
                     hide=["C", 3])),
         kept=("Item: Paint | Cost: 12",), invented=("secret", "Brush", "80%"),
         said=("1 hidden row", "1 hidden column", "(3)", "(C)")),
    Case("hidden rows and columns", "key-hidden.xlsx",
         book(S=rows([["Key", "Name", "Age"], [7, "Ann", 31], [8, "Bob", 42]], hide=["A"])),
         kept=("Name: Ann | Age: 31",), invented=("Key", "7"), said=("1 hidden column", "(A)")),
    Case("hidden rows and columns", "filtered.xlsx",
         book(S=rows([["Name", "Age"], ["Ann", 31], ["Bob", 42], ["Cy", 53], ["Dee", 64]],
                     hide=[3, 4])),
         kept=("Name: Ann | Age: 31", "Name: Dee | Age: 64"), invented=("Bob", "53"),
         said=("2 hidden rows (3, 4)",)),
    Case("raised text", "tank.xlsx", book(S=raised),
         kept=("10^6 litres", "CO_2 and ~~40 euros~~ 30 euros"), invented=("106",)),
]  # fmt: skip
