"""Words and sentence patterns from which ``prompts`` builds training prompts. All written for this project."""

NAMES = """Ana Ben Carla Dmitri Elena Farid Grace Hugo Ines Jonas Kira Leo Maya Nils Olga Pablo Quinn Rosa Sven Tara
Umar Vera Will Xenia Yusuf Zoe Aisha Bruno Chloe Diego Emma Felix Gina Hassan Ivy Jamal Kevin Laura Marcus Nora
Oscar Priya Ravi Sofia Tom Uma Victor Wendy Yara Zack Alice Bob James John Mary Sarah Emily Michael Lisa Mark""".split()
NOT_NAMES = frozenset("""Monday Tuesday Wednesday Thursday Friday Saturday Sunday January February March April May June
July August September October November December The How What If Then She His Her They There Each""".split())
GOODS = """apples,oranges,pencils,books,cookies,marbles,stickers,cupcakes,tickets,bottles of water,eggs,shirts,toy cars,
flowers,candles,notebooks,muffins,balloons,chairs,stamps,boxes of cereal,pizzas,bags of rice,bracelets,coins,lamps,
trading cards,seashells,sandwiches,plants,socks,hats,bricks,tiles,loaves of bread,jars of honey,donuts,crayons,
basketballs,puzzles""".replace("\n", "").split(",")
NUMBER_RANGES = {"p": (2, 12), "q": (13, 60), "r": (2, 9), "s": (10, 40), "t": (61, 400), "u": (2, 6), "pc": (5, 60)}

MATH_OPENINGS = """{a} has {q} {x}.
{a} bought {p} {x} for ${r} each.
A shop sold {q} {x} on Monday and {s} {x} on Tuesday.
{a} and {b} together have {t} {x}.
A box holds {p} {x}, and {a} has {s} boxes.
{a} earns ${s} an hour and works {r} hours a day.
There are {t} students at a school and {q} of them brought {x}.
{a} reads {s} pages every day.
A farmer packs {t} {x} into crates of {p}.
{a} runs {r} miles every morning.
Each week {a} saves ${q}.
{a} makes {p} {x} every {r} days.
A bakery uses {r} cups of flour to make {p} {x}.
A train travels {q} miles every hour.
{a} is {q} years old and {b} is {p} years younger.
In a garden there are {p} rows with {s} {x} in each row.""".split("\n")
MATH_STEPS = """{b} gives {a} {p} more {x}.
{a} gives away {r} of them to {b}.
The next day there are {u} times as many.
Then {b} takes half of them.
{a} also buys {r} {y} at ${p} each.
After that {pc}% of them are sold.
{b} has twice as many as {a}.
Later {a} finds {s} {y} and trades each one for {u} {x}.
{b} does the same, but {r} fewer.
The price goes up by {pc}%.
This goes on for {p} weeks.
{a} loses {r} of them on the way home.
They share everything equally among {u} friends.
{b} pays ${q} of the cost.""".split("\n")
MATH_QUESTIONS = """How many {x} does {a} have now?
How many are left?
How much money did {a} spend in total?
How many {x} do {a} and {b} have altogether?
What is the total cost?
How many more does {b} have than {a}?
How much does each person get?
How long does it take in total?
How much money does {a} have left from ${t}?
How many does {a} have after {p} days?
What is the average per day over {r} days?
How many would there be in a year?""".split("\n")
MATH_WHOLE = """{a} drove {q} miles in {r} hours, rested, and then drove {t} miles in {p} hours. What was the average speed in miles per hour?
A rectangle is {p} cm wide and {q} cm long. What are its area and its perimeter?
{a} is {u} times as old as {b}. In {r} years the sum of their ages will be {t}. How old is {a} now?
A shirt costs ${q}. During a sale the price falls by {pc}%. How much do {r} shirts cost during the sale?
If {r} workers build a wall in {s} days, how many days do {p} workers need for the same wall?
{a} puts ${t} in a bank that pays {r}% simple interest a year. How much is in the account after {u} years?
Solve for x: {r}x + {q} = {t}.
What is {q} times {p}, minus {s}?
A tank holds {t} liters. It fills at {p} liters a minute and leaks {u} liters a minute. How many minutes until it is full?
{a} mixes {r} liters of juice with {p} liters of water. What percentage of the drink is juice?
{a} scored {q}, {s}, and {t} points in three games. What was {a}'s average score?
A class of {s} children is split into groups of {u}. Each group needs {p} sheets of paper. How many sheets are needed?
{a} wants a bike that costs ${t}. {a} has ${q} and saves ${p} each week. How many weeks must {a} wait?
The ratio of {x} to {y} in a basket is {u}:{r}. There are {t} pieces in total. How many {x} are there?
{a} buys {p} {x} at ${r} each and {u} {y} at ${s} each and pays with ${t}. How much change does {a} get?
Every {u} minutes a machine makes {s} {x}. How many {x} does it make in {p} hours?
{a} ate {r} {x} on Monday and twice as many on each following day. How many {x} did {a} eat in {u} days?
A movie starts at {p}:15 and lasts {t} minutes. When does it end?
{a} has {s} coins, all dimes and quarters, worth ${p}.50 altogether. How many are quarters?
A car uses {p} liters of fuel for 100 km. How much fuel does it use for {t} km, and what does that cost at ${u} a liter?
{a}'s rent is ${t}0 a month. {b} pays {pc}% of it. How much does {a} pay in a year?
There are {q} red, {s} blue and {p} green {x} in a bag. What is the probability of drawing a green one?
A school orders {t} {x} in packs of {p}. Each pack costs ${u}. How much does the order cost?
{a} walks {u} km to school and back every day, {r} days a week. How far does {a} walk in {p} weeks?""".split("\n")

CODE_ASKS = """Write a Python function to {task}.
Write a function to {task}.
Write a Python program to {task}.
How do I {task} in Python?
Implement a function that can {task}.
Please write Python code to {task}.
Can you show me how to {task} in Python?
I need a short script to {task}.
Write a class with a method to {task}.
Write a Python function called solve to {task}.""".split("\n")
CODE_VERBS = """find the largest element of {what}
find the {n} smallest elements of {what} {rule}
count the elements of {what} {rule}
remove duplicates from {what}
sort {what} {rule}
check whether {what} contains an element {rule}
reverse {what} without using built-in functions
split {what} into chunks of size {n}
sum all elements of {what} {rule}
rotate {what} by {n} positions
merge two sorted copies of {what}
convert {what} to a dictionary
find the index of the first element {rule} in {what}
flatten {what}
print {what} in reverse order
return every {n}th element of {what}
compute the product of the elements of {what}
filter {what} and keep only elements {rule}
group the elements of {what} by their length
find the longest run of equal elements in {what}
find the most common element in {what}
replace every element {rule} in {what} with None
read {what} from a file and print it
write {what} to a JSON file
find all pairs in {what} whose sum is {n}
compute the average of {what}
check if a number is divisible by {n}
compute the first {n} Fibonacci numbers
find the greatest common divisor of two numbers
check whether a string is a palindrome
compute the factorial of a number recursively
find all prime numbers below {n}00
convert a temperature from Celsius to Fahrenheit
count the vowels in a string
implement binary search on {what}
implement a stack with push and pop
implement a queue using two stacks
implement bubble sort on {what}
traverse a binary tree in order
compute the area of a triangle
validate an email address with a regular expression
count the words in a text file
compute the Levenshtein distance of two strings
generate a random password of length {n}
parse a CSV file and sum its column {n}
convert a decimal number to binary
find the missing number in {what}
multiply two matrices
transpose a matrix
find the intersection of two lists
compute the power of a number without using the ** operator
check if two strings are anagrams
capitalize the first letter of each word in a string
compute the nth triangular number
find the second largest number in {what}
find the longest common prefix of a list of strings
check if parentheses in a string are balanced
download a web page and count its links
measure how long a function takes to run
retry a function {n} times if it raises an exception
cache the results of a function
simulate rolling {n} dice
draw a simple bar chart with matplotlib
connect to a SQLite database and list its tables
compute the moving average of {what} with window {n}""".split("\n")
CODE_OBJECTS = """a list of integers
a list of strings
a tuple of numbers
a list of tuples
a nested list
a dictionary of lists
a string
a list of dictionaries
a set of words
a numpy array
a linked list
a list of floats
a list of lists
a sorted array""".split("\n")
CODE_RULES = """that are even
that are greater than {n}
that start with a vowel
by their second value
that occur more than once
in descending order
longer than {n} characters
that are divisible by 3
that are prime
by the sum of their digits
that are negative
in alphabetical order""".replace("{n}", "5").split("\n")
CODE_ENDS = (["", "", "", " Add a docstring.", " Explain your solution step by step.", " Use recursion.", " Include examples.",
              " Do not use any imports.", " Use type hints.", " Then test it with assert statements.",
              " Keep it as short as possible.", " Write it in JavaScript instead of Python.", " Handle invalid input.",
              " What is its time complexity?"])  # fmt: skip
LIBRARY = """textwrap shutil random statistics string tempfile bisect heapq calendar difflib fnmatch glob inspect
json locale mimetypes operator os posixpath pprint quopri re shlex socket subprocess timeit token tokenize traceback
types typing urllib.parse uuid warnings zipfile ast base64 bdb cmd codecs collections colorsys configparser contextlib
copy csv datetime dis email.utils fileinput fractions functools gettext getopt getpass gzip hashlib hmac html http.client
imaplib io ipaddress linecache logging mailbox numbers optparse pathlib pickle pkgutil platform plistlib poplib queue
runpy sched secrets selectors site smtplib stat struct sysconfig tarfile threading trace urllib.request wave weakref
xml.dom.minidom xml.etree.ElementTree""".split()

CHAT_FORMS = """What is {topic}?
Explain {topic} in simple terms.
What are the main causes of {topic}?
What are the advantages and disadvantages of {topic}?
How does {topic} affect {other}?
Compare {topic} and {other}.
Give me {n} tips about {topic}.
Write a short essay about {topic}.
Write a poem about {topic}.
Write a {style} story about {person} and {topic}.
Tell me an interesting fact about {topic}.
List {n} books about {topic}.
How can I learn more about {topic}?
Write an email to {person} about {topic}.
Summarize the history of {topic}.
What do most people misunderstand about {topic}?
Why is {topic} important?
How would {person} explain {topic} to a child?
Create a lesson plan about {topic} for {n} days.
Imagine you are {person}. What would you say about {topic}?
Write a dialogue between {person} and {person} about {topic}.
Describe {place} in a {style} way.
Plan a {n}-day trip to {place}.
What should I see and do in {place}?
What can I do with {thing}?
Write a product description for {thing}.
Write an advertisement for {thing} in a {style} tone.
How do I clean {thing}?
How do I choose {thing}?
What skills does {person} need?
Write a job description for {person}.
Write a cover letter for a job as {person}.
How do I become {person}?
Give {n} interview questions for {person}.
Suggest {n} names for a company that sells {thing}.
Write a {style} tweet about {topic}.
Write a blog post introduction about {topic}.
What is the relationship between {topic} and {other}?
Is {topic} good or bad for society? Give arguments for both sides.
What will {topic} look like in {n}0 years?
Give a step-by-step guide to {topic} for beginners.
What questions should I ask an expert on {topic}?
Write a speech about {topic} for {person}.
Make a list of {n} words related to {topic} and define each.
Rewrite the following sentence in a {style} tone: {topic} changes the way we think about {other}.
Translate into a formal register: hey, do you know anything about {topic}?
Classify each item as useful or not useful for {topic}: {thing}, a map, a notebook, patience.
Name a movie about {topic} and describe its plot.
Write a recipe that {person} would love.
What are common mistakes people make with {topic}?
Draft an announcement for an event about {topic} in {place}.
Can you help me understand {topic}? I only know about {other}.
Write {n} multiple choice questions about {topic}.
What is the difference between {topic} and {other}?
Describe a day in the life of {person} in {place}.
Write a review of {thing}.
Give me advice: {person} wants me to spend less time on {topic}.
Write a haiku about {place}.
What are the health effects of {topic}?
How is {topic} measured?
Write a letter of complaint about {thing}.
Suggest a healthy weekly routine that includes {topic}.""".split("\n")
CHAT_ENDS = ["", "", "", "", "", " Answer in two sentences.", " Be brief.", " Give an example.", " Use bullet points.",
             " Explain your reasoning.", " Keep it under 100 words.", " Write it for beginners.",
             " Please be as detailed as possible.", " Use a numbered list."]  # fmt: skip
TOPICS = """climate change,photosynthesis,the French Revolution,machine learning,black holes,inflation,yoga,meditation,
chess,gardening,the stock market,democracy,evolution,quantum mechanics,jazz music,renewable energy,vaccines,volcanoes,
the Roman Empire,cryptocurrency,healthy eating,sleep,time management,public speaking,social media,space travel,
artificial intelligence,the water cycle,gravity,DNA,electric cars,recycling,deforestation,the Renaissance,Shakespeare,
poetry,photography,cooking,baking bread,coffee,tea,wine,football,basketball,running,swimming,cycling,hiking,camping,
fishing,sailing,architecture,painting,sculpture,opera,ballet,cinema,television,video games,board games,magic tricks,
mathematics,statistics,probability,geometry,algebra,calculus,logic,philosophy,ethics,psychology,sociology,anthropology,
economics,politics,law,history,geography,geology,astronomy,chemistry,physics,biology,medicine,dentistry,nursing,
veterinary science,agriculture,forestry,oceans,rivers,deserts,mountains,islands,earthquakes,hurricanes,tornadoes,
rainbows,lightning,snow,bees,butterflies,dinosaurs,whales,sharks,penguins,elephants,dogs,cats,horses,birds,
the immune system,the human heart,the brain,memory,dreams,stress,anxiety,happiness,friendship,love,parenting,education,
homework,online learning,university,scholarships,job interviews,remote work,leadership,teamwork,negotiation,marketing,
branding,customer service,entrepreneurship,personal finance,budgeting,taxes,insurance,mortgages,retirement,globalization,
immigration,human rights,gender equality,poverty,hunger,war,peace,religion,mythology,folklore,language learning,grammar,
writing,reading,libraries,museums,tourism,airplanes,trains,bridges,robots,3D printing,nanotechnology,the internet,
cybersecurity,passwords,programming,databases,operating systems,computer networks,open source software,blockchain,
data science,neural networks,the printing press,the steam engine,the Industrial Revolution,the Cold War,World War II,
the Silk Road,ancient Egypt,ancient Greece,the Vikings,the moon landing,the solar system,Mars,comets,telescopes,
microscopes,magnetism,electricity,sound,light,heat,energy,water,air pollution,plastic waste,biodiversity,endangered species,
national parks,fashion,jewelry,makeup,tattoos,weddings,holidays,birthdays,music theory,guitar,piano,drums,singing,dancing,
theater,stand-up comedy,journalism,propaganda,advertising,minimalism,feng shui,home decoration,plumbing,carpentry,sewing,
knitting,origami,calligraphy,handwriting,maps,compasses,clocks,calendars,numbers,money,trade,supply and demand,
unemployment,interest rates,the United Nations,elections,constitutions,courts,police,prisons,firefighting,first aid,
nutrition,vitamins,protein,sugar,salt,allergies,diabetes,cancer,viruses,bacteria,antibiotics,surgery""".replace("\n", "").split(",")
PEOPLE = """a teacher,a nurse,a software engineer,a chef,a pirate,a detective,an astronaut,a farmer,a lawyer,a musician,
a data scientist,a truck driver,a librarian,a firefighter,a dentist,my boss,my neighbor,my best friend,a journalist,
a product manager,a graphic designer,an accountant,a pilot,a biologist,a wizard,a time traveler,a talking cat,
an architect,a personal trainer,a coach,a customer,a landlord,a professor,a student,a young girl,an old king,
Albert Einstein,Cleopatra,Leonardo da Vinci,Sherlock Holmes""".replace("\n", "").split(",")
THINGS = """a bicycle,a laptop,a pair of running shoes,an umbrella,a coffee machine,a tent,a smartphone,a wooden table,
a guitar,a leather jacket,a blender,a vacuum cleaner,a camera,a water bottle,headphones,a mattress,a houseplant,
an electric scooter,a backpack,a cast iron pan,candles,a smart watch,a board game,olive oil,chocolate,a pillow,
sunglasses,a garden hose,old newspapers,glass jars""".replace("\n", "").split(",")
PLACES = """Paris,Tokyo,New York,Iceland,Morocco,Kenya,Peru,the Alps,the Sahara,Hawaii,Rome,Istanbul,Sydney,a small village,
a haunted house,a space station,the Amazon rainforest,a busy market,an abandoned factory,San Francisco,London,Berlin,
Mexico City,Mumbai,a quiet beach,an underwater city,Scotland,Norway,Vietnam,Toronto""".replace("\n", "").split(",")
STYLES = """funny,sad,formal,casual,mysterious,romantic,scary,inspiring,poetic,sarcastic,short,detailed,dramatic,
professional,friendly,persuasive""".replace("\n", "").split(",")

STARTS = {
    "chat": ["", "What", "How", "Why", "Write a", "Explain", "Can you", "Give me", "I am", "I'm", "Describe", "List",
             "Tell me", "Create", "Imagine", "Is it", "What are", "What is the", "How do I", "How can", "Summarize",
             "Please", "Compare", "Generate", "Suggest", "Which", "Who", "When", "Where", "Given", "Rewrite", "Translate",
             "Identify", "Design", "Write an email", "Write a story", "Write a poem", "Help me", "The", "Should",
             "Discuss", "Come up with", "In", "Find", "Classify", "Edit", "You are", "My", "A", "Does",
             "Do you", "Write a short", "What would", "How would you", "Analyze", "Make a list", "Could you"],
    "code": ["Write a Python function to", "Write a function to", "Write a Python function that takes", "Write a Python",
             "Implement a", "Write a program", "Write code", "How do I use Python to", "Write a Python script",
             "Create a Python class", "Given a list", "Write a function that returns", "Write a python function to find",
             "Write a function to check", "Write a function to count", "Complete the following Python function.\n\n```python\ndef",
             "Write a function to find the", "Write a SQL query", "Fix the bug in this code:", "Explain this Python code:"],
    "math": ["If", "A", "Solve", "What is the", "Find the", "Calculate", "There are", "In a", "How many", "The sum",
             "Two", "A train", "A store", "A box", "Each", "On Monday,", "At the", "Tom has", "Sarah bought", "John is",
             "Emily has", "Mark earns", "Lisa wants", "Every day,", "A farmer", "A baker", "A school", "Maria makes",
             "James runs", "A company", "A rectangle", "Last week,", "Jack and Jill", "Michael is", "Twice", "There were"],
}  # fmt: skip
